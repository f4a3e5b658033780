"""Candidates: a tree of tokens behind the last generated one, and the protocol of what proposes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lp.compiled import given
from lp.draft.tree import DraftTree
from lp.sampling.top_logits import TopLogits


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What a step read, the same on every rank.

    Attributes:
        tokens, positions, parents: of all slots, as in StepLayout.
        nodes: those that were read, n.
        sampled: (n,) the token each chose.
        top_logits: of each, (n, K).
        ngrams: one of N tokens off every column of the window.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    parents: Sequence[int]
    nodes: Sequence[int]
    sampled: Sequence[int]
    top_logits: TopLogits
    ngrams: Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """What the rows of a step cost in tokens.

    Attributes:
        tokens_per_s: tokens that a second is worth; 0: rows cost nothing.
        base_tokens: rows that the step has anyway.
        seconds: by rows of the whole step.
        marginal_seconds: by rows, the least that one more costs, as in StepTimes.
        exploration_bonus, exploration_tokens: tokens that a row is worth though it be turned down, for what it says; of so many rows.
        calibration: what to believe of a token's chance, given the one before it.
        depth_discount: a path of d tokens is believed to hold with 1 / (1 + depth_discount x d), besides.
    """

    tokens_per_s: float
    base_tokens: int
    seconds: Any
    marginal_seconds: Any
    exploration_bonus: float = 0.0
    exploration_tokens: int = 0
    calibration: float = 1.0
    depth_discount: float = 0.0

    @classmethod
    def free(cls, rows: int) -> TokenPrice:
        """Rows are free, up to so many."""
        return cls(0.0, 0, given(np.zeros(rows + 1)), given(np.zeros(rows + 1)))


class DraftSource(Protocol):
    """What guesses the text to come. One is made for every `generate` call."""

    num_logits: int  # K, likeliest tokens wanted of every row that is read

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

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """What the rows before the prompt's last said: (L - 1, K), as in StepSamples; only if they were read."""
        ...

    def observe(self, text: Sequence[int], moved: int, seen: StepSamples) -> None:
        """Learn from a step, whose `moved` tokens end the text."""
        ...
