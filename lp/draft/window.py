"""The 2-D lookahead window (paper section 3.1): guesses of coming tokens, from which n-grams for the pool are made.

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
    """Two paths of the window that serve as draft tokens at no cost, since a step computes their nodes anyway.

    Both begin with `c`, the newest token of the text; they are empty on a rank that does not compute them.
    """

    level_0: Any = ()  # token ids, as a list or as compiled functions take it
    column_0: Any = ()  # likewise


class WindowNodes(NamedTuple):
    """The shape of a rank's part of the window, as arrays that compiled functions take.

    The first node is `c`, the newest token of the text, at position p.

    Attributes:
        parents: int64 (nodes,), index of every node's parent; -1 for `c`, which is node 0.
        distances: int64 (nodes,), every node's position less p.
        on_walk: bool (nodes,), whether the node's token may be accepted: `c`, level 0 and column 0.
        sampled: bool (nodes,), whether a token is sampled at the node: those on a walk, and the last level.
    """

    parents: Any
    distances: Any
    on_walk: Any
    sampled: Any


@dataclass(frozen=True)
class WindowSlice:
    """The window columns first..end-1, which one rank computes in a step, with level 0 from `c` up to the last of them.

    Attributes:
        first, end: the first column, and the one behind the last; equal if the rank has no columns.
        levels: N - 1, number of levels of the window.
    """

    first: int
    end: int
    levels: int

    @cached_property
    def num_columns(self) -> int:
        """Number of window columns that the rank computes."""
        return self.end - self.first

    @cached_property
    def level_0_nodes(self) -> int:
        """Number of level-0 nodes that the rank computes, `c` included."""
        return max(self.end, 1) if self.num_columns else 1

    @cached_property
    def num_nodes(self) -> int:
        """Number of window nodes that the rank computes, `c` included."""
        return self.level_0_nodes + self.num_columns * (self.levels - 1)

    @cached_property
    def first_of_last_level(self) -> int:
        """Index of the rank's first node on the window's last level; the other nodes of that level follow it."""
        return self.first if self.levels == 1 else self.num_nodes - self.num_columns

    @cached_property
    def nodes(self) -> WindowNodes:
        """Parents and positions of the rank's window nodes, in their order: `c` and level 0, then the other levels."""
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
    """The slices of the window that all ranks compute, by rank."""

    @cached_property
    def num_nodes(self) -> np.ndarray:
        """Number of window nodes of each rank, `c` included: int64 (R,)."""
        return np.array([own.num_nodes for own in self], np.int64)

    @cached_property
    def num_columns(self) -> int:
        """Number of window columns that all ranks compute together."""
        return sum(own.num_columns for own in self)

    @cached_property
    def shapes(self) -> Any:
        """First column, number of columns, and number of level-0 nodes of each rank: int64 (R, 3)."""
        return compiled_ints([(own.first, own.num_columns, own.level_0_nodes) for own in self])

    @cached_property
    def holders(self) -> list[int]:
        """The ranks that have columns, ordered by their first column."""
        return sorted((rank for rank, own in enumerate(self) if own.num_columns), key=lambda rank: self[rank].first)


@lru_cache(maxsize=1024)
def slice_window(columns: int, ngram_size: int, rooms: tuple[int, ...]) -> WindowSlices:
    """Divide the window's columns among ranks: the last rank gets as many of the last columns as fit, and so on.

    A rank that computes a column must also compute level 0 up to it, so columns on few ranks repeat the fewest nodes.
    With N = 2 the window is level 0 alone: the rank with the most room gets all of it.

    Args:
        columns: W, number of columns; the slices have fewer together if the ranks have no room for all.
        ngram_size: N.
        rooms: (R,), tokens that each rank may spend on `c` and the window.

    Returns:
        The slice of each rank; slices may be empty.
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
    """The lookahead window of one text: W columns of N - 1 guessed tokens; each step appends a level and drops one.

    `window_size` may be changed between steps.

    Args:
        window_size: W, at least 0.
        ngram_size: N, at least 2.
        text: token ids of the prompt, not empty; every column starts as N - 1 consecutive tokens of it, so that the
            first step has a whole window.

    Attributes:
        levels: N - 1 lists of W token ids.
    """

    def __init__(self, window_size: int, ngram_size: int, text: Sequence[int]) -> None:
        self.window_size = window_size
        self.ngram_size = ngram_size
        columns = [self._new_column(text, len(text) - 1 + j) for j in range(window_size)]
        self.levels = [[column[k] for column in columns] for k in range(ngram_size - 1)]
        if window_size:
            self.levels[0][0] = text[-1]

    def ngrams(self, sampled: Sequence[int]) -> list[tuple[int, ...]]:
        """Make n-grams for the pool: each column's N - 1 guesses and the token sampled at its last level.

        Args:
            sampled: tokens sampled at the last level, by column; there may be fewer than W.
        """
        return [(*(level[j] for level in self.levels), token) for j, token in enumerate(sampled)]

    def drafts(self, columns: WindowSlice) -> WindowDrafts:
        """The tokens that can serve as draft tokens at no cost on a rank with these columns: level 0, and column 0."""
        if not columns.num_columns:
            return WindowDrafts()
        column_0 = [level[0] for level in self.levels] if columns.first == 0 else []
        return WindowDrafts(self.levels[0][: columns.end], column_0)

    def advance(self, text: Sequence[int], num_new: int, sampled: Sequence[int]) -> None:
        """Go on to the next step: drop level 0, append the sampled tokens as last level, and move along with the text.

        Columns move left by the number of generated tokens, so that each guess keeps its position in the text; new
        columns fill up the right.

        Args:
            text: prompt and generated tokens, those of the step included.
            num_new: how many tokens the step generated, at least 1.
            sampled: tokens sampled at the last level, by column; fewer than W near the context's end.
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
