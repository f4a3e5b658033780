"""Penalties on tokens that a sequence has already: OpenAI's presence and frequency penalties, and repetition penalties.

n: nodes, L: tokens of the prefix, V: vocabulary.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor


class CountPenalty(LogitsProcessor):
    """OpenAI's presence and frequency penalties: lower the logit of each token that was generated already.

    Args:
        prompt_tokens: number of tokens of the prompt, left padding included; they do not count as generated.
        presence: amount subtracted once, however often the token was generated.
        frequency: amount subtracted for each time that the token was generated.
        last: look only at this many last tokens of the prefix, and count the generated ones among them; None: count all
            generated tokens.
    """

    per_branch = True

    def __init__(self, prompt_tokens: int, presence: float, frequency: float, last: int | None = None) -> None:
        self.prompt_tokens = prompt_tokens
        self.presence = presence
        self.frequency = frequency
        self.last = last

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (n, V) of the next token, with the penalties subtracted.

        Args:
            input_ids: int64 (n, L), the prefix of each node.
            scores: (n, V).
        """
        first = self.prompt_tokens if self.last is None else max(self.prompt_tokens, input_ids.shape[1] - self.last)
        generated = input_ids[:, first:]
        vocabulary = scores.shape[1]
        known = (generated < vocabulary).to(scores.dtype)  # a model may embed more tokens than it can give
        counts = torch.zeros_like(scores).scatter_add_(1, generated.clamp(max=vocabulary - 1), known)
        return scores - self.frequency * counts - self.presence * (counts > 0).to(scores.dtype)


class RecentRepetitionPenalty(RepetitionPenaltyLogitsProcessor):
    """transformers' repetition penalty for tokens among the last ones of the prefix, whether prompt or generated.

    Args:
        penalty: transformers' repetition_penalty: a factor that positive scores are divided by and negative scores are
            multiplied with; 1 is no penalty.
        last: how many tokens at the end of the prefix are looked at.
    """

    per_branch = True

    def __init__(self, penalty: float, last: int) -> None:
        super().__init__(penalty)
        self.last = last

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (n, V) of the next token, with the penalty applied.

        Args:
            input_ids: int64 (n, L), the prefix of each node.
            scores: (n, V).
        """
        processed: torch.Tensor = super().__call__(input_ids[:, -self.last :], scores)
        return processed
