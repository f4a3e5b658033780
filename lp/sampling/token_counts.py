"""How often each token came in a text so far, kept on the device for penalties.

One int32 a token: GENERATED for each time that it was generated, PROMPT for each time that the prompt has it.
Q: texts, V: vocabulary.
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
    """The counts of one text.

    Args:
        vocabulary: V.
        first_generated: position of the first token that counts as generated.
        padding: left padding of the prompt, which counts as of the prompt.
        device: where the counts are.
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
        """The counts of several texts, of which row `place` is this one's."""
        assert self._counts_QV is not None
        return self._counts_QV

    @property
    def shape(self) -> int:
        """V: texts for which it is the same may have one buffer."""
        return self.vocabulary

    def buffer(self, texts: int) -> torch.Tensor:
        """Room for so many texts like this one: int32 (texts, V)."""
        return torch.zeros(texts, self.vocabulary, dtype=torch.int32, device=self.device)

    def use(self, counts_QV: torch.Tensor, place: int) -> None:
        """Count there from now on: a captured step reads the memory that it was captured with."""
        if counts_QV is not self._counts_QV or place != self.place:
            self._counts_QV, self.place = counts_QV, place
            self._num_counted = 0

    def uncounted(self, text: Sequence[int], num_tokens: int, most: int) -> list[tuple[int, int]]:
        """What the counts lack of the first tokens of the text: (index in the flattened counts, what to add there).

        Whoever adds it notes it by `counted`. Where it is more than `most` pairs, everything is counted here.

        Args:
            text: prompt and generated tokens.
            num_tokens: how many first tokens of the text are to be counted.
            most: pairs that the caller has room for.
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
        """Note that the first `num_tokens` tokens of the text are counted."""
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
