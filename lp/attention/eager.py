"""The backend `attention=eager`: transformers' own attention in plain matrix products, which every architecture has."""

from __future__ import annotations

from lp.attention.base import AttentionBackend
from lp.attention.registry import register_attention


@register_attention("eager")
class Eager(AttentionBackend):
    """Attention in plain products, for models that no other backend takes, such as those with capped scores.

    It needs additive masks: bool ones would be added to the scores as 0 and 1.
    """

    implementation = "eager"
    alternative = None
    loadable = True
