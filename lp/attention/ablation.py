"""Runs a model without attention, to measure how much of a forward pass attention takes; its output means nothing.

T: step tokens, H: query heads, D: head dimension.
"""

from __future__ import annotations

from typing import Self

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "lp_without_attention"


class WithoutAttention:
    """A `with` block in which a model uses its queries as the result of attention; keys and values are still cached.

    Captured steps replay what they were captured with: enter the block before the first step.

    Args:
        model: the model to run without attention; for a ModelRunner `runner.model`.

    Attributes:
        called: whether the model's layers have called it; if not, attention was not left out, as the model does not use
            transformers' registry of attention functions.
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
