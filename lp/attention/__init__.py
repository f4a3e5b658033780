"""Attention backends for tree-shaped steps."""

from lp.attention.masks import StepMasks
from lp.attention.registry import choices, set_attention

__all__ = ["StepMasks", "choices", "set_attention"]
