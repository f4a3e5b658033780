"""Logits processors and a criterion of tests' own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from lp.sampling.noise import gumbel


class Alternating(LogitsProcessor):
    """A user's own: whether the prefix's sum is odd decides which half of the tokens is favoured."""

    per_branch = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        odd = (input_ids.sum(-1, keepdim=True) + torch.arange(scores.shape[-1], device=scores.device)) % 2
        return scores - 1.5 * odd


class Noise(LogitsProcessor):
    """The Gumbel noise of the position to come: with it, the argmax of `generate` is coupled sampling."""

    def __init__(self, seed: int, sequence: int = 0) -> None:
        self.seed = seed
        self.sequence = sequence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + gumbel(self.seed, self.sequence, input_ids.shape[1], scores.shape[-1], scores.device)


class SumCriterion(StoppingCriteria):
    """Ends where the sum of all ids is a multiple."""

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(-1) % self.multiple == 0
