"""The 2-D lookahead window (paper section 3.1): guesses of coming tokens, from which n-grams for the pool are made.

W: number of columns; N: n-gram size, so there are N - 1 levels; p: position of `c`, the newest token of the text.
Entry [k][j] (level k, column j, both from 0) is a guess for position p + j + k. Entry [0][0] is `c` itself.
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
    """Two paths of the lookahead window that serve as draft tokens at no cost, since a step computes them anyway.

    The paths are level 0 and column 0. Both begin with the newest token of the text. A path is empty on a rank that
    does not compute it.
    """

    level_0: Any = ()  # token ids, as a list or as compiled functions take it
    column_0: Any = ()  # likewise


class WindowNodes(NamedTuple):
    """The nodes of one rank's part of the lookahead window, as arrays for functions compiled by numba.

    Node 0 is `c`, the newest token of the text, at position p.

    Attributes:
        parents: int64 (nodes,), index of every node's parent; -1 for node 0.
        distances: int64 (nodes,), position of every node in the text, less p.
        on_walk: bool (nodes,), whether the node's token may be accepted: `c`, level 0 and column 0.
        sampled: bool (nodes,), whether a token is sampled at the node: nodes whose token may be accepted, and the last
            level.
    """

    parents: Any
    distances: Any
    on_walk: Any
    sampled: Any


@dataclass(frozen=True)
class WindowSlice:
    """The window columns that one rank computes in a decode step.

    The rank also computes level 0 from the window's first column up to the last of these columns.

    Attributes:
        first, end: columns from `first` to `end` - 1, counted from 0; both are equal if the rank has no columns.
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
        """Number of nodes on level 0 of the window that the rank computes, including the newest token of the text."""
        return max(self.end, 1) if self.num_columns else 1

    @cached_property
    def num_nodes(self) -> int:
        """Number of window nodes that the rank computes, including the newest token of the text."""
        return self.level_0_nodes + self.num_columns * (self.levels - 1)

    @cached_property
    def first_of_last_level(self) -> int:
        """Index of the rank's first window node on the last level; its later window nodes are all on this level."""
        return self.first if self.levels == 1 else self.num_nodes - self.num_columns

    @cached_property
    def nodes(self) -> WindowNodes:
        """The rank's window nodes in the order of computation: level 0 (the newest token first), then other levels."""
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
    """The parts of the lookahead window that ranks compute: one WindowSlice for each rank, in the order of ranks."""

    @cached_property
    def num_nodes(self) -> np.ndarray:
        """Number of window nodes that each rank computes, including the newest token of the text: int64 (R,)."""
        return np.array([own.num_nodes for own in self], np.int64)

    @cached_property
    def num_columns(self) -> int:
        """Number of window columns that all ranks compute together."""
        return sum(own.num_columns for own in self)

    @cached_property
    def shapes(self) -> Any:
        """First column, number of columns, and number of level-0 nodes for each rank: int64 (R, 3)."""
        return compiled_ints([(own.first, own.num_columns, own.level_0_nodes) for own in self])

    @cached_property
    def holders(self) -> list[int]:
        """Ranks that compute at least one window column, ordered by their first column."""
        return sorted((rank for rank, own in enumerate(self) if own.num_columns), key=lambda rank: self[rank].first)


@lru_cache(maxsize=1024)
def slice_window(columns: int, ngram_size: int, rooms: tuple[int, ...]) -> WindowSlices:
    """Divide the window's columns among ranks: the last rank gets as many of the last columns as fit, and so on.

    A rank that computes a column must also compute level 0 up to this column. So few nodes are computed twice if few
    ranks have columns. With N = 2 the window is level 0 alone, and the rank with the most room gets all of it.

    Args:
        columns: W, number of columns to divide; if the ranks have no room for all columns, only the first ones are
            divided.
        ngram_size: N, number of tokens in an n-gram.
        rooms: (R,), number of tokens that each rank may use for the window, including the newest token of the text.

    Returns:
        The columns of each rank; a rank may have none.
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
    """The lookahead window for one text: W columns of N - 1 guessed tokens; each step drops a level and appends one.

    `window_size` may be changed between steps.

    Args:
        window_size: W, number of columns, at least 0.
        ngram_size: N, number of tokens in an n-gram, at least 2.
        text: token ids of the prompt, not empty; every column starts as N - 1 consecutive tokens of the prompt, so that
            the first step already has a full window.

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
        """Make n-grams for the pool: each column's N - 1 guesses, and the token sampled at the column's last level.

        Args:
            sampled: token ids sampled at the last level, by column; there may be fewer than W.
        """
        return [(*(level[j] for level in self.levels), token) for j, token in enumerate(sampled)]

    def drafts(self, columns: WindowSlice) -> WindowDrafts:
        """Window tokens that serve as draft tokens at no cost on a rank: level 0, and column 0 if the rank has it.

        Args:
            columns: columns of the window that the rank computes.
        """
        if not columns.num_columns:
            return WindowDrafts()
        column_0 = [level[0] for level in self.levels] if columns.first == 0 else []
        return WindowDrafts(self.levels[0][: columns.end], column_0)

    def advance(self, text: Sequence[int], num_new: int, sampled: Sequence[int]) -> None:
        """Move the window on to the next step: drop level 0, and append the sampled tokens as the last level.

        Columns move left by the number of generated tokens minus 1, and dropping a level moves guesses by 1 more. So
        each guess keeps its position in the text. New columns fill up the right.

        Args:
            text: token ids of the prompt and the generated tokens, including the step's.
            num_new: number of tokens that the step generated, at least 1.
            sampled: token ids sampled at the last level, by column; fewer than W near the end of the context window.
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
