"""The backend `attention=eager`: transformers' own attention in plain matrix products, which every architecture has."""

from __future__ import annotations

from lp.attention.base import AttentionBackend
from lp.attention.registry import register_attention


@register_attention("eager")
class Eager(AttentionBackend):
    """Attention in plain matrix products, for models that no other backend can run, such as those with capped scores.

    It needs masks of numbers that are added to the scores. A bool mask would add 0 and 1 instead.
    """

    implementation = "eager"
    alternative = None
    loadable = True
