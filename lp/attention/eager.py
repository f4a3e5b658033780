"""transformers' own attention in plain matrix products, which every architecture has."""

from __future__ import annotations

from lp.attention.base import AttentionBackend
from lp.attention.registry import register_attention


@register_attention("eager")
class Eager(AttentionBackend):
    """Plain products; also for capped scores and attention sinks. A bool mask would be added to the scores."""

    implementation = "eager"
    alternative = None
    loadable = True
