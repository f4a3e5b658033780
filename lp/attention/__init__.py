"""Attention backends for tree-shaped steps: one file each, listed in `lp.attention.registry`."""
