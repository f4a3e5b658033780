"""Runs a model without attention, to measure how much of a forward pass attention takes; the output is meaningless.

T: step tokens, H: query heads, D: head dimension.
"""

from __future__ import annotations

from typing import Self

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "lp_without_attention"


class WithoutAttention:
    """Context manager in which a model skips attention: each layer uses its queries as the output of attention.

    Keys and values are still cached. A captured step (recorded as a CUDA graph) keeps the attention that it was
    recorded with, so enter the block before the first step.

    Args:
        model: the model to run without attention; for a ModelRunner, `runner.model`.

    Attributes:
        called: whether some layer has called this stand-in. If not, attention was not skipped, as the model does not
            use transformers' registry of attention functions.
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
