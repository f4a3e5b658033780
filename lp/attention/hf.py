"""The only touch on transformers' attention registry: `lp_tree`, by which a model runs its steps through ours."""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lp.attention.flash import step_attention

FLASH = "lp_tree"  # transformers takes a name with "flash" in it for the flash-attn package


def flash_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    places: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """A step's attention where the mask is the step's own, (1, 1, T, T); sdpa where it shows all keys, or is none.

    Args:
        query: (1, H, T, D).
        key, value: (1, G, N, D), cached rows included.
        places: as in `step_attention`.

    Returns:
        (1, T, H, D), and no weights, as transformers wants it.
    """
    rows = query.shape[2]
    own = attention_mask is not None and attention_mask.is_floating_point() and attention_mask.shape[-1] == rows
    if attention_mask is None or not own or (query.is_cuda and rows == key.shape[2]):  # theirs are bool
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    out = step_attention(query, key, value, attention_mask, scaling, places)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `lp_tree` known; again is harmless."""
    AttentionInterface.register(FLASH, flash_attention_forward)
    AttentionMaskInterface.register(FLASH, sdpa_mask)
