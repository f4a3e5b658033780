"""Attention backends for tree-shaped steps."""

from lp.attention.masks import StepMasks
from lp.attention.registry import NAMES, choices, set_attention

__all__ = ["NAMES", "StepMasks", "choices", "set_attention"]
