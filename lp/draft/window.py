"""The 2-D lookahead window (paper section 3.1).

W: columns; N: n-gram size, so N - 1 levels; p: position of `c`, the newest token of the text.
Entry [k][j] (level k, column j) is a guess for position p + j + k; entry [0][0] is `c` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_STRIDE = 2654435761  # Knuth's multiplicative hash: spreads neighbouring positions over the text


class WindowDrafts(NamedTuple):
    """Two paths of the window that are drafts at no cost, `c` first: their nodes are in the step anyway."""

    level_0: Any = ()  # tokens, as a list or as compiled functions take it
    column_0: Any = ()


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
        self._anchor(text)

    def ngrams(self, sampled: Sequence[int]) -> list[tuple[int, ...]]:
        """The n-gram of every column whose last level sampled a token: (columns, N)."""
        return [(*(level[j] for level in self.levels), token) for j, token in enumerate(sampled)]

    def drafts(self) -> WindowDrafts:
        """Level 0 and column 0."""
        column_0 = [level[0] for level in self.levels] if self.window_size else []
        return WindowDrafts(self.levels[0], column_0)

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
        self.levels = levels
        self._anchor(text)

    def _anchor(self, text: Sequence[int]) -> None:
        if self.window_size:
            self.levels[0][0] = text[-1]

    def _new_column(self, text: Sequence[int], position: int) -> list[int]:
        """N - 1 consecutive tokens of the text, from an index that depends on the position alone."""
        start = position * _STRIDE % len(text)
        return [text[(start + k) % len(text)] for k in range(self.ngram_size - 1)]
