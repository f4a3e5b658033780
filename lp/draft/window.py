"""The 2-D lookahead window (paper section 3.1).

W: columns, N: n-gram size, p: position of the last generated token `c`.
Entry [k][j] of the rows is a guess for position p + j + k; entry [0][0] is `c` itself.
"""

from __future__ import annotations

from collections.abc import Sequence

_STRIDE = 2654435761  # Knuth's multiplicative hash: spreads neighbouring positions over the text


class LookaheadWindow:
    """W columns of N - 1 guesses, advanced by one row each step; `window_size` may change between steps.

    Args:
        window_size: W >= 0.
        ngram_size: N >= 2.
        text: the prompt, not empty; every column starts as N - 1 tokens in a row of it, so the first step
            already has a whole window.
    """

    def __init__(self, window_size: int, ngram_size: int, text: Sequence[int]) -> None:
        self.window_size, self.ngram_size = window_size, ngram_size
        columns = [self._fresh(text, len(text) - 1 + j) for j in range(window_size)]
        self.levels = [[column[k] for column in columns] for k in range(ngram_size - 1)]  # (N-1, W)
        self._anchor(text)

    def ngrams(self, new: Sequence[int]) -> list[tuple[int, ...]]:
        """The n-gram of every column that read a new token: (columns, N)."""
        return [(*(row[j] for row in self.levels), token) for j, token in enumerate(new)]

    def free_drafts(self) -> tuple[list[int], list[int]]:
        """Row 0 and column 0, `c` first: candidates at no extra row."""
        return self.levels[0], [row[0] for row in self.levels] if self.window_size else []

    def advance(self, text: Sequence[int], moved: int, new: Sequence[int]) -> None:
        """Drop row 0, append the new tokens, move left so that every entry keeps its position, refill on the right.

        Args:
            text: prompt and everything generated, the step's tokens included.
            moved: tokens the step generated, >= 1.
            new: the last row's read-offs by column, at most W (fewer near the context's end).
        """
        filled = [*new, *self.levels[-1][len(new) :]]
        rows = [row[moved - 1 :][: self.window_size] for row in (*self.levels[1:], filled)]
        for j in range(len(rows[0]), self.window_size):
            column = self._fresh(text, len(text) - 1 + j)
            if j:  # its left neighbour has guesses for all its positions but the last
                column[:-1] = [row[-1] for row in rows[1:]]
            for row, token in zip(rows, column, strict=True):
                row.append(token)
        self.levels = rows
        self._anchor(text)

    def _anchor(self, text: Sequence[int]) -> None:
        if self.window_size:
            self.levels[0][0] = text[-1]

    def _fresh(self, text: Sequence[int], position: int) -> list[int]:
        """N - 1 consecutive tokens of the text, from a place that depends on the position alone."""
        start = position * _STRIDE % len(text)
        return [text[(start + k) % len(text)] for k in range(self.ngram_size - 1)]
