"""Layers that cache latents, as DeepSeek's do (MLA): how the latents of a pass are expanded into keys and values.

Newer releases of transformers cache one small vector, the latent, for each token. Every pass expands the latents of all
cached tokens into the keys and values of all heads. In a pass over several sequences, the latents of each sequence are
expanded by themselves. Where a token must get the same bits in every pass, the matrix products have the same number of
rows each time, however many tokens are cached.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lp.attention.parts import InParts
from lp.models.releases import EXPAND_LATENTS

BLOCK = 64  # latents of a product: the width of a pass that `lp.models.equal_widths` compares all others with


def expand_latents_by_sequence(model: nn.Module, same_bits: bool) -> None:
    """Let layers that cache latents (DeepSeek's MLA) expand them to keys and values one sequence at a time from now on.

    Args:
        model: a view of the model (a copy of its modules over the same weights), whose layers are changed.
        same_bits: whether a token's keys and values must have the same bits in every pass: latents are then expanded
            BLOCK tokens at a time.
    """
    for module in model.modules():
        if hasattr(type(module), EXPAND_LATENTS):
            vars(module)[EXPAND_LATENTS] = partial(_expanded, module, same_bits)


def _expanded(layer: Any, same_bits: bool, *latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all heads, (1, H, N, D) and (1, H, N, E): tensors, or parts where latents are in parts."""
    in_parts = [each for each in latents if isinstance(each, InParts)]
    if len(in_parts) == len(latents):
        parts = zip(*[each.parts for each in in_parts], strict=True)
        keys, values = zip(*[_expanded(layer, same_bits, *part) for part in parts], strict=True)
        return InParts.of_all(keys), InParts.of_all(values)
    expand = partial(getattr(type(layer), EXPAND_LATENTS), layer)
    if not same_bits:
        expanded: tuple[torch.Tensor, torch.Tensor] = expand(*latents)
        return expanded
    count = latents[0].shape[2]
    blocks = zip(*[F.pad(each, (0, 0, 0, -count % BLOCK)).split(BLOCK, 2) for each in latents], strict=True)
    keys, values = zip(*[expand(*block) for block in blocks], strict=True)
    return torch.cat(keys, 2)[:, :, :count], torch.cat(values, 2)[:, :, :count]
