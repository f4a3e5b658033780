"""Attention backends for tree-shaped steps."""

from lp.attention.masks import StepMasks, resolve

__all__ = ["StepMasks", "resolve"]
