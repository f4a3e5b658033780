"""Candidates: a tree of tokens behind the last generated one, and the protocol of what proposes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenTree:
    """Candidate paths that share their common prefixes, within a budget of nodes.

    Args:
        budget: most nodes the tree may hold.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens: list[int] = []
        self.parents: list[int] = []  # -1 is the root: the last generated token
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
        child = self._child.get((node, token))
        if child is None and not self.full:
            child = self._child[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
        return child

    def child(self, node: int, token: int) -> int | None:
        """The child of a node that carries the token, if there is one."""
        return self._child.get((node, token))


class CandidateSource(Protocol):
    """What guesses the text to come. One is made for every `generate` call."""

    def propose(self, text: Sequence[int], budget: int) -> TokenTree:
        """A tree behind text[-1] of at most `budget` nodes."""
        ...

    def observe(
        self,
        text: Sequence[int],
        moved: int,
        ngrams: Sequence[tuple[int, ...]],
        guesses: Sequence[tuple[int, int, int]],
    ) -> None:
        """Learn from a step.

        Args:
            text: prompt and generated tokens, of which the last `moved` are new.
            moved: tokens of the step.
            ngrams: one of N tokens off every column of the window.
            guesses: (position, token there, token chosen behind it) of every row that was read.
        """
        ...
