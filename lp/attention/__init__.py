"""Attention backends for tree-shaped steps: a file for each, which registers it; a new one is one more import here."""

from lp.attention import sdpa, eager, flash, flex  # noqa: F401, I001  (the order in which `attention` names its choices)
from lp.attention.base import AttentionBackend
from lp.attention.masks import StepMasks
from lp.attention.registry import AUTO, backend_named, backends_to_try, choices, register, set_attention

__all__ = [
    "AUTO",
    "AttentionBackend",
    "StepMasks",
    "backend_named",
    "backends_to_try",
    "choices",
    "register",
    "set_attention",
]
