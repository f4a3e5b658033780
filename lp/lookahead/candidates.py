"""Candidates: a tree of tokens behind the last generated one, and the protocol of what proposes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lp.lookahead.compiled import given


class TokenTree:
    """Candidate paths that share their common prefixes, within a budget of nodes.

    Args:
        budget: most nodes the tree may hold.
        shared: paths share slots with each other and with the window; False lays each out on its own.
    """

    def __init__(self, budget: int, shared: bool = True) -> None:
        self.budget, self.shared = budget, shared
        self.tokens: list[int] = []
        self.parents: list[int] = []  # -1 is the root: the last generated token
        self.chances: list[float] = []  # of being accepted, where the source states them
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.budget

    def add(self, path: Iterable[int]) -> None:
        """Insert a path from the root; what it shares is there already, what exceeds the budget is cut."""
        node = -1
        for token in path:
            child = self.grow(node, token)
            if child is None:
                return
            node = child

    def grow(self, node: int, token: int) -> int | None:
        """The child of a node (-1 is the root) that carries the token, made if the budget allows; else None."""
        child = self._child.get((node, token)) if self.shared else None
        if child is None and not self.full:
            child = self._child[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
        return child

    def foretold(self, text: Sequence[int]) -> tuple[float, int]:
        """How many tokens of what came the chances promised, each given the one before, and how many the tree had.

        Both are 0 where the source states no chances.
        """
        if not self.chances:
            return 0.0, 0
        mass = [0.0] * (len(self) + 1)  # of a node's children, given the node
        child = {}
        for node, (token, parent, chance) in enumerate(zip(self.tokens, self.parents, self.chances, strict=True)):
            mass[parent] += chance / self.chances[parent] if parent >= 0 else chance
            child[parent, token] = node
        node, expected, came = -1, 0.0, 0
        for token in text:
            expected += mass[node]
            if (node, token) not in child:
                break
            node, came = child[node, token], came + 1
        return expected, came


@dataclass(frozen=True, slots=True)
class StepReads:
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
class Price:
    """What the rows of a step cost in tokens.

    Attributes:
        rate: tokens that a second is worth; 0: rows cost nothing.
        base: rows that the step has anyway.
        seconds: by rows of the whole step.
        slopes: by rows, the least that one more costs, as in StepCurve.
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
    def free(cls, rows: int) -> Price:
        """Rows are free, up to so many."""
        return cls(0.0, 0, given(np.zeros(rows + 1)), given(np.zeros(rows + 1)))


class CandidateSource(Protocol):
    """What guesses the text to come. One is made for every `generate` call."""

    harvest: int  # K, likeliest tokens wanted of every row that is read

    def propose(
        self, text: Sequence[int], budget: int, row: Sequence[int], column: Sequence[int], price: Price | None, /
    ) -> TokenTree:
        """A tree behind text[-1] of at most `budget` nodes, not counting those that repeat the window's.

        Args:
            text: prompt and generated tokens.
            budget: candidate rows.
            row, column: row 0 and column 0 of the window, text[-1] first; candidates that repeat them cost no row.
            price: what rows cost, for sources that know what they bring; None: as good as nothing.
        """
        ...

    def begin(self, prompt: Sequence[int], harvest: np.ndarray) -> None:
        """What the rows before the prompt's last said: (L - 1, K), as in StepReads; only if they were read."""
        ...

    def observe(self, text: Sequence[int], moved: int, seen: StepReads) -> None:
        """Learn from a step, whose `moved` tokens end the text."""
        ...
