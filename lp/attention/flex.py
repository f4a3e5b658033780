"""The backend `attention=flex` for GPUs: torch's FlexAttention with a block mask for each step."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from lp.attention.base import AttentionBackend, View
from lp.attention.registry import register_attention


def block_mask(visible_TN: torch.Tensor) -> BlockMask:
    """Make a mask for FlexAttention, which then skips blocks of keys that no token sees.

    Args:
        visible_TN: bool (T, N), whether each of T tokens sees each of N keys.
    """
    num_tokens, num_keys = visible_TN.shape
    return create_block_mask(
        lambda batch, head, token, key: visible_TN[token, key], None, None, num_tokens, num_keys, visible_TN.device
    )


@register_attention("flex")
class Flex(AttentionBackend):
    """Attention by transformers' FlexAttention; its steps can't be captured (recorded as CUDA graphs)."""

    implementation = "flex_attention"
    capture_obstacle = "attention=flex makes a mask of another kind each step"

    def unfit(self, model: PreTrainedModel) -> str | None:
        if model.device.type == "cpu":
            return "attention=flex is for GPUs, and on a CPU slower than the others; choose attention=flash"
        return None

    def mask(self, view: View) -> BlockMask:
        return block_mask(view.visible_TN())
