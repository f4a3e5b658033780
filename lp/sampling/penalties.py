"""Penalties on tokens that were generated already, as OpenAI's interface has them.

n: nodes, L: tokens of the prefix, V: vocabulary.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessor


class CountPenalty(LogitsProcessor):
    """Subtracts from the logits of generated tokens: once, and once for each time.

    Args:
        prompt_tokens: of the prompt, whose tokens do not count.
        presence: subtracted once.
        frequency: subtracted for each time.
    """

    per_branch = True

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (n, V).

        Args:
            input_ids: (n, L).
            scores: (n, V).
        """
        generated = input_ids[:, self.prompt_tokens :]
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
