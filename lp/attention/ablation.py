"""Attention left out, to time a forward pass without it; the text that it gives means nothing.

T: step tokens, H: query heads, D: head dimension.
"""

from __future__ import annotations

from typing import Self

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "lp_without_attention"


class WithoutAttention:
    """Within its `with` block the model takes queries for attention's result; keys and values are still cached.

    Captured steps replay what they were captured with: enter it before the first one.

    Args:
        model: the model whose attention is left out; of a ModelRunner its own view, `runner.model`.

    Attributes:
        called: whether the model called it; if not, its attention does not go through transformers' registry.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.called = False
        AttentionInterface.register(NAME, self._pass_queries)
        AttentionMaskInterface.register(NAME, sdpa_mask)

    def __enter__(self) -> Self:
        self.before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        return self

    def __exit__(self, *failure: object) -> None:
        self.model.set_attn_implementation(self.before)

    def _pass_queries(
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
