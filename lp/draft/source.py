"""Candidates: a tree of tokens behind the last generated one, and the protocol of what proposes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lp.compiled import given
from lp.draft.tree import DraftTree


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What a step read, the same on every rank.

    Attributes:
        tokens, positions, parents: of all slots, as in StepLayout.
        slots: those that were read, n.
        chosen: (n,) the token each chose.
        harvest: (n, K) int64, the likeliest tokens of each: token << 32 | bits of its float32 logit.
        ngrams: one of N tokens off every column of the window.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    parents: Sequence[int]
    slots: Sequence[int]
    chosen: Sequence[int]
    harvest: np.ndarray
    ngrams: Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """What the rows of a step cost in tokens.

    Attributes:
        rate: tokens that a second is worth; 0: rows cost nothing.
        base: rows that the step has anyway.
        seconds: by rows of the whole step.
        slopes: by rows, the least that one more costs, as in StepTimes.
        lesson, lessons: tokens that a row is worth though it be turned down, for what it says; of so many rows.
        truth: what to believe of a token's chance, given the one before it.
        risk: a path of d tokens is believed to hold with 1 / (1 + risk x d), besides.
    """

    rate: float
    base: int
    seconds: Any
    slopes: Any
    lesson: float = 0.0
    lessons: int = 0
    truth: float = 1.0
    risk: float = 0.0

    @classmethod
    def free(cls, rows: int) -> TokenPrice:
        """Rows are free, up to so many."""
        return cls(0.0, 0, given(np.zeros(rows + 1)), given(np.zeros(rows + 1)))


class DraftSource(Protocol):
    """What guesses the text to come. One is made for every `generate` call."""

    harvest: int  # K, likeliest tokens wanted of every row that is read

    def propose(
        self, text: Sequence[int], budget: int, row: Sequence[int], column: Sequence[int], price: TokenPrice | None, /
    ) -> DraftTree:
        """A tree behind text[-1] of at most `budget` nodes, not counting those that repeat the window's.

        Args:
            text: prompt and generated tokens.
            budget: candidate rows.
            row, column: row 0 and column 0 of the window, text[-1] first; candidates that repeat them cost no row.
            price: what rows cost, for sources that know what they bring; None: as good as nothing.
        """
        ...

    def begin(self, prompt: Sequence[int], harvest: np.ndarray) -> None:
        """What the rows before the prompt's last said: (L - 1, K), as in StepSamples; only if they were read."""
        ...

    def observe(self, text: Sequence[int], moved: int, seen: StepSamples) -> None:
        """Learn from a step, whose `moved` tokens end the text."""
        ...
