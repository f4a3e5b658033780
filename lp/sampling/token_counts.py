"""Counts how often each token occurs in a sequence so far; the counts stay on the device, for penalties.

The count of a token is one int32: GENERATED for each time that it was generated, plus PROMPT for each time that it
occurs in the prompt. Q: sequences that share a buffer, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lp.to_device import to_device

GENERATED = 1
PROMPT = 1 << 20  # more than any text generates
MOST_IN_PROMPT = 1000  # times that a prompt's token counts: penalties ask only whether it is there


class TokenCounts:
    """Counts how often each token occurs in one sequence; every step adds the tokens that it has generated.

    Args:
        vocabulary: V, size of the vocabulary.
        first_generated: position of the first token that counts as generated.
        padding: token ids of the prompt's left padding, which count as tokens of the prompt.
        device: where the counts are kept.

    Attributes:
        place: this sequence's row in the buffer.
    """

    def __init__(self, vocabulary: int, first_generated: int, padding: Sequence[int], device: torch.device) -> None:
        self.vocabulary = vocabulary
        self.first_generated = first_generated
        self.padding = padding
        self.device = device
        self.place = 0
        self._counts_QV: torch.Tensor | None = None
        self._num_counted = 0  # tokens of the text

    @property
    def counts_QV(self) -> torch.Tensor:
        """The buffer with the counts of all sequences that share it, int32 (Q, V); row `place` is this sequence's."""
        assert self._counts_QV is not None
        return self._counts_QV

    @property
    def shape(self) -> int:
        """Size of the vocabulary; sequences can share a buffer if this number is equal for all of them."""
        return self.vocabulary

    def buffer(self, texts: int) -> torch.Tensor:
        """Make a buffer of zeros for the counts of several sequences: int32 (texts, V), V being the vocabulary's size.

        Args:
            texts: number of sequences that the buffer has room for.
        """
        return torch.zeros(texts, self.vocabulary, dtype=torch.int32, device=self.device)

    def use(self, counts_QV: torch.Tensor, place: int) -> None:
        """Count in a given buffer from now on, such as the one that a captured step (a CUDA graph) reads.

        Args:
            counts_QV: a buffer made by `buffer`.
            place: this sequence's row in the buffer.
        """
        if counts_QV is not self._counts_QV or place != self.place:
            self._counts_QV, self.place = counts_QV, place
            self._num_counted = 0

    def uncounted(self, text: Sequence[int], num_tokens: int, most: int) -> list[tuple[int, int]]:
        """List what must be added to the counts so that they cover the first `num_tokens` tokens of the sequence.

        The caller adds it and then calls `counted`. If nothing has been counted yet, or if more than `most` tokens are
        missing, this method counts all of them itself and returns [].

        Args:
            text: token ids of the prompt and of the generated tokens.
            num_tokens: number of tokens, from the first one on, that the counts must cover.
            most: most additions that the caller has room for.

        Returns:
            (index in the flattened buffer, amount to add there) for each missing token.
        """
        if self._counts_QV is None:
            self.use(self.buffer(1), 0)
        first = self._num_counted
        if not first or num_tokens - first > most:
            self._count_all(text, num_tokens)
            self.counted(num_tokens)
            return []
        start = self.place * self.vocabulary
        return [
            (start + text[position], self._value(position))
            for position in range(first, num_tokens)
            if text[position] < self.vocabulary
        ]

    def counted(self, num_tokens: int) -> None:
        """Record that the counts now cover the first `num_tokens` tokens of the sequence."""
        self._num_counted = num_tokens

    def _value(self, position: int) -> int:
        return GENERATED if position >= self.first_generated else PROMPT

    def _count_all(self, text: Sequence[int], num_tokens: int) -> None:
        tokens = np.array([*self.padding, *text[:num_tokens]], np.int64)
        generated = tokens[len(self.padding) + self.first_generated :]
        prompt = tokens[: len(self.padding) + self.first_generated]
        counts = np.bincount(prompt, minlength=self.vocabulary)[: self.vocabulary].clip(max=MOST_IN_PROMPT) * PROMPT
        counts += np.bincount(generated, minlength=self.vocabulary)[: self.vocabulary]
        self.counts_QV[self.place].copy_(to_device(counts.astype(np.int32), self.device))
