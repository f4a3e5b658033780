"""Attention backends for tree-shaped steps; `lp.attention.registry` has them by name."""
