"""Penalties on tokens that came already: of a text so far, as OpenAI's interface has them, or of its last tokens.

n: nodes, L: tokens of the prefix, V: vocabulary.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor


class CountPenalty(LogitsProcessor):
    """Subtracts from the logits of generated tokens: once, and once for each time.

    Args:
        prompt_tokens: length of the prompt, whose tokens do not count.
        presence: subtracted once.
        frequency: subtracted for each time.
        last: how many last tokens count; None for all.
    """

    per_branch = True

    def __init__(self, prompt_tokens: int, presence: float, frequency: float, last: int | None = None) -> None:
        self.prompt_tokens = prompt_tokens
        self.presence = presence
        self.frequency = frequency
        self.last = last

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (n, V).

        Args:
            input_ids: (n, L).
            scores: (n, V).
        """
        first = self.prompt_tokens if self.last is None else max(self.prompt_tokens, input_ids.shape[1] - self.last)
        generated = input_ids[:, first:]
        vocabulary = scores.shape[1]
        known = (generated < vocabulary).to(scores.dtype)  # a model may embed more tokens than it can give
        counts = torch.zeros_like(scores).scatter_add_(1, generated.clamp(max=vocabulary - 1), known)
        return scores - self.frequency * counts - self.presence * (counts > 0).to(scores.dtype)


class RecentRepetitionPenalty(RepetitionPenaltyLogitsProcessor):
    """transformers' repetition penalty on the last tokens alone, of the prompt or not.

    Args:
        penalty: what transformers calls repetition_penalty.
        last: how many tokens.
    """

    per_branch = True

    def __init__(self, penalty: float, last: int) -> None:
        super().__init__(penalty)
        self.last = last

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (n, V).

        Args:
            input_ids: (n, L).
            scores: (n, V).
        """
        processed: torch.Tensor = super().__call__(input_ids[:, -self.last :], scores)
        return processed
