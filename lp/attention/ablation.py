"""Attention left out, to time what a forward pass is without it; its text means nothing.

T: rows, H: query heads, D: head dimension.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "lp_without_attention"


class WithoutAttention:
    """`with` it, the model hands queries through as if they were attention's result; keys and values are still cached.

    Args:
        model: whose attention to leave out.

    Attributes:
        called: whether the model asked; if not, its attention does not go through transformers' registry.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.called, self.before = model, False, model.config._attn_implementation
        AttentionInterface.register(NAME, self._hand_through)
        AttentionMaskInterface.register(NAME, sdpa_mask)

    def __enter__(self) -> None:
        self.before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)

    def __exit__(self, *failure: object) -> None:
        self.model.set_attn_implementation(self.before)

    def _hand_through(
        self,
        module: torch.nn.Module,
        q_1HTD: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        self.called = True  # no count, which torch.compile would compile anew for
        return q_1HTD[..., : v.shape[-1]].transpose(1, 2).contiguous(), None
