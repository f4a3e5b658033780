"""How often each token came in a text so far, kept on the device for penalties.

A count is one int32 for each token: GENERATED for each time that it was generated, PROMPT for each time that the prompt
has it. Q: texts that share a buffer, V: vocabulary.
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
    """Token counts of one text, which every step brings up to date with the tokens that it added.

    Args:
        vocabulary: V.
        first_generated: position of the first token that counts as generated.
        padding: token ids of the prompt's left padding, which count as tokens of the prompt.
        device: where the counts are.

    Attributes:
        place: this text's row in the buffer.
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
        """The buffer: counts of the Q texts that share it, int32 (Q, V). Row `place` is this text's."""
        assert self._counts_QV is not None
        return self._counts_QV

    @property
    def shape(self) -> int:
        """V; texts with an equal one can share a buffer."""
        return self.vocabulary

    def buffer(self, texts: int) -> torch.Tensor:
        """A new buffer of zeros for the counts of several texts: int32 (texts, V).

        Args:
            texts: how many texts it has room for.
        """
        return torch.zeros(texts, self.vocabulary, dtype=torch.int32, device=self.device)

    def use(self, counts_QV: torch.Tensor, place: int) -> None:
        """Count into this buffer from now on, since a captured step reads the memory that it was captured with.

        Args:
            counts_QV: a buffer that `buffer` made.
            place: this text's row in it.
        """
        if counts_QV is not self._counts_QV or place != self.place:
            self._counts_QV, self.place = counts_QV, place
            self._num_counted = 0

    def uncounted(self, text: Sequence[int], num_tokens: int, most: int) -> list[tuple[int, int]]:
        """What has to be added to the counts so that they hold the first `num_tokens` tokens of the text.

        The caller adds it and says so by `counted`. Where nothing is counted yet, or more than `most` tokens are
        missing, this counts all of them itself and returns [].

        Args:
            text: token ids of the prompt and of the generated tokens.
            num_tokens: how many first tokens of the text are to be counted.
            most: how many pairs the caller has room for.

        Returns:
            (index in the flattened buffer, what to add there) for each token.
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
        """Note that the first `num_tokens` tokens of the text are in the counts."""
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
