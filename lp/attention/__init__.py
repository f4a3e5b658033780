"""Attention backends: ways to compute attention under the mask of a draft tree; `lp.attention.registry` lists them."""
