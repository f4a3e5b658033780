"""The 2-D lookahead window (paper section 3.1).

W: columns; N: n-gram size, so N - 1 levels; p: position of `c`, the newest token of the text.
Entry [k][j] (level k, column j) is a guess for position p + j + k; entry [0][0] is `c` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from lp.compiled import compiled_array, compiled_ints

_STRIDE = 2654435761  # Knuth's multiplicative hash: spreads neighbouring positions over the text


class WindowDrafts(NamedTuple):
    """Two paths of the window that are drafts at no cost, `c` first: their nodes are in the step anyway."""

    level_0: Any = ()  # tokens, as a list or as compiled functions take it
    column_0: Any = ()


class WindowNodes(NamedTuple):
    """The nodes of `c` and of a slice of the window, as compiled functions take them.

    Attributes:
        parents, distances: int64 (nodes,); distance from p.
        on_walk: bool (nodes,), those that a walk may reach: `c`, level 0 and column 0.
        sampled: bool (nodes,), those whose token is sampled: those on a walk, and the last level.
    """

    parents: Any
    distances: Any
    on_walk: Any
    sampled: Any


@dataclass(frozen=True)
class WindowSlice:
    """The window columns first..end-1, which one rank computes, with level 0 up to the last of them.

    Attributes:
        first, end: no columns where they are equal.
        levels: N - 1.
    """

    first: int
    end: int
    levels: int

    @cached_property
    def num_columns(self) -> int:
        """Number of columns that the rank has."""
        return self.end - self.first

    @cached_property
    def level_0_nodes(self) -> int:
        """Number of nodes that the rank has of level 0, `c` included."""
        return max(self.end, 1) if self.num_columns else 1

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes that the rank has of the window, `c` included."""
        return self.level_0_nodes + self.num_columns * (self.levels - 1)

    @cached_property
    def first_of_last_level(self) -> int:
        """The node of the first column that samples its column's next token; the others follow it."""
        return self.first if self.levels == 1 else self.num_nodes - self.num_columns

    @cached_property
    def nodes(self) -> WindowNodes:
        """How these nodes lie behind each other: `c` and level 0, then the other levels."""
        entries = [(0, j) for j in range(self.level_0_nodes)]
        entries += [(k, j) for k in range(1, self.levels) for j in range(self.first, self.end)]
        index = {entry: node for node, entry in enumerate(entries)}
        parents = [index[k - 1, j] if k else j - 1 for k, j in entries]
        on_walk = np.array([k == 0 or j == 0 for k, j in entries])
        sampled = on_walk.copy()
        sampled[self.first_of_last_level :] = True
        return WindowNodes(
            parents=compiled_ints(parents),
            distances=compiled_ints([k + j for k, j in entries]),
            on_walk=compiled_array(on_walk),
            sampled=compiled_array(sampled),
        )


class WindowSlices(tuple[WindowSlice, ...]):
    """Every rank's slice of the window, and what a step needs to know of all of them."""

    @cached_property
    def num_nodes(self) -> np.ndarray:
        """How many nodes of `c` and the window each rank has: int64 (R,)."""
        return np.array([own.num_nodes for own in self], np.int64)

    @cached_property
    def num_columns(self) -> int:
        """Number of columns that all ranks have together."""
        return sum(own.num_columns for own in self)

    @cached_property
    def shapes(self) -> Any:
        """First column, number of columns, and number of level-0 nodes of each rank: int64 (R, 3)."""
        return compiled_ints([(own.first, own.num_columns, own.level_0_nodes) for own in self])

    @cached_property
    def holders(self) -> list[int]:
        """The ranks that have columns, by their first one."""
        return sorted((rank for rank, own in enumerate(self) if own.num_columns), key=lambda rank: self[rank].first)


@lru_cache(maxsize=1024)
def slice_window(columns: int, ngram_size: int, rooms: tuple[int, ...]) -> WindowSlices:
    """Share the window's columns among ranks, as many on each as fit, from the last column and the last rank.

    A column needs all of level 0 before it, so columns on few ranks repeat the fewest nodes. With N = 2 level 0 is all
    there is: it lies on one rank, which has the most room.

    Args:
        columns: W; fewer where ranks have no room for all.
        ngram_size: N.
        rooms: by rank, tokens for `c` and the window.

    Returns:
        By rank, its slice.
    """
    levels = ngram_size - 1
    ranks = len(rooms)
    if levels == 1:
        holder = max(range(ranks), key=lambda rank: (rooms[rank], rank))
        columns = max(min(columns, rooms[holder]), 0)
        return WindowSlices(WindowSlice(0, columns if rank == holder else 0, 1) for rank in range(ranks))
    while True:
        slices = [WindowSlice(0, 0, levels)] * ranks
        end = columns
        for rank in reversed(range(ranks)):
            fitting = min(max(rooms[rank] - end, 0) // (levels - 1), end)
            slices[rank] = WindowSlice(end - fitting, end, levels)
            end -= fitting
        if end == 0:
            return WindowSlices(slices)
        columns -= 1


class LookaheadWindow:
    """W columns of N - 1 guesses, advanced by one level each step; `window_size` may change between steps.

    Args:
        window_size: W >= 0.
        ngram_size: N >= 2.
        text: the prompt, not empty; every column starts as N - 1 consecutive tokens of it, so the first step
            already has a whole window.

    Attributes:
        levels: N - 1 lists of W tokens.
    """

    def __init__(self, window_size: int, ngram_size: int, text: Sequence[int]) -> None:
        self.window_size = window_size
        self.ngram_size = ngram_size
        columns = [self._new_column(text, len(text) - 1 + j) for j in range(window_size)]
        self.levels = [[column[k] for column in columns] for k in range(ngram_size - 1)]
        if window_size:
            self.levels[0][0] = text[-1]

    def ngrams(self, sampled: Sequence[int]) -> list[tuple[int, ...]]:
        """The n-gram of every column whose last level sampled a token: (columns, N)."""
        return [(*(level[j] for level in self.levels), token) for j, token in enumerate(sampled)]

    def drafts(self, columns: WindowSlice) -> WindowDrafts:
        """Level 0 and column 0, as far as a rank with these columns has them."""
        if not columns.num_columns:
            return WindowDrafts()
        column_0 = [level[0] for level in self.levels] if columns.first == 0 else []
        return WindowDrafts(self.levels[0][: columns.end], column_0)

    def advance(self, text: Sequence[int], num_new: int, sampled: Sequence[int]) -> None:
        """Drop level 0, append the sampled tokens, move left so that entries keep their positions, refill on the right.

        Args:
            text: prompt and everything generated, the step's tokens included.
            num_new: tokens the step generated, >= 1.
            sampled: tokens of the last level by column, at most W (fewer near the context's end).
        """
        last = [*sampled, *self.levels[-1][len(sampled) :]]
        levels = [level[num_new - 1 :][: self.window_size] for level in (*self.levels[1:], last)]
        for j in range(len(levels[0]), self.window_size):
            column = self._new_column(text, len(text) - 1 + j)
            if j:  # its left neighbour has guesses for all its positions but the last
                column[:-1] = [level[-1] for level in levels[1:]]
            for level, token in zip(levels, column, strict=True):
                level.append(token)
        if self.window_size:
            levels[0][0] = text[-1]
        self.levels = levels

    def _new_column(self, text: Sequence[int], position: int) -> list[int]:
        """N - 1 consecutive tokens of the text, from an index that depends on the position alone."""
        start = position * _STRIDE % len(text)
        return [text[(start + k) % len(text)] for k in range(self.ngram_size - 1)]
