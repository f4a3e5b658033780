"""The n-gram pool (paper section 3.2): remembers n-grams by their first token."""

from __future__ import annotations

from collections.abc import Sequence

from lp.lookahead.candidates import TokenTree

MOST_PAIRS = 1 << 16


class NGramPool:
    """The most recent n-grams behind every token, and what rows read lately guessed for the positions to come.

    Holds at most vocabulary x `per_token` n-grams and MOST_PAIRS pairs; guesses go as the text passes them.

    Args:
        ngram_size: N, tokens of an n-gram.
        per_token: G, n-grams kept behind one token; the least recently seen goes first.
        depth: longest path proposed, in tokens; beyond N - 1 n-grams are chained.
        prompt: its n-grams are known from the start; empty for none.
        output_ngrams: n-grams of generated text enter.
    """

    def __init__(
        self, ngram_size: int, per_token: int, depth: int, prompt: Sequence[int] = (), output_ngrams: bool = True
    ) -> None:
        self.ngram_size, self.per_token, self.depth, self.output_ngrams = ngram_size, per_token, depth, output_ngrams
        self._after: dict[tuple[int, int], int] = {}  # two tokens -> what followed them last, newest last
        self._behind: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> tails (N-1), newest last
        self._guesses: dict[int, dict[int, int]] = {}  # position -> token there -> the window's guess behind it
        self._learn_text(prompt, len(prompt))

    def add(self, ngram: Sequence[int]) -> None:
        """Remember one n-gram of N tokens as the newest behind its first."""
        tails = self._behind.setdefault(ngram[0], {})
        tail = tuple(ngram[1:])
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self.per_token:
            del tails[next(iter(tails))]

    def propose(self, text: Sequence[int], budget: int) -> TokenTree:
        """What followed the last two tokens, the guesses for these positions, the newest n-grams behind text[-1]."""
        tree = TokenTree(budget)
        if len(text) > 1:
            tree.add(self._continued(text))
        tree.add(self._guessed(len(text) - 1, text[-1]))
        for tail in reversed(self._behind.get(text[-1], {})):
            if tree.full:
                break
            tree.add(self._chained(tail))
        return tree

    def observe(
        self,
        text: Sequence[int],
        moved: int,
        ngrams: Sequence[tuple[int, ...]],
        guesses: Sequence[tuple[int, int, int]],
    ) -> None:
        """Window n-grams first, then the text's own, which are surer and so the newest."""
        for past in [known for known in self._guesses if known < len(text) - 1]:
            del self._guesses[past]
        for position, token, follower in guesses:
            if position >= len(text) - 1:
                known = self._guesses.setdefault(position, {})
                known.pop(token, None)  # the newest goes last
                known[token] = follower
        for ngram in ngrams:
            self._learn_pairs(ngram)
            self.add(ngram)
        if self.output_ngrams:
            self._learn_text(text, moved)

    def _learn_text(self, text: Sequence[int], moved: int) -> None:
        """Every n-gram that ends in one of the last `moved` tokens."""
        n = self.ngram_size
        self._learn_pairs(text[max(len(text) - moved - 2, 0) :])
        for end in range(max(len(text) - moved + 1, n), len(text) + 1):
            self.add(text[end - n : end])

    def _learn_pairs(self, tokens: Sequence[int]) -> None:
        for first, second, follower in zip(tokens, tokens[1:], tokens[2:], strict=False):
            self._after.pop((first, second), None)
            self._after[first, second] = follower
        while len(self._after) > MOST_PAIRS:
            del self._after[next(iter(self._after))]

    def _continued(self, text: Sequence[int]) -> list[int]:
        """The path of what followed two tokens last: surer than one token's n-grams, and as deep as a loop is long."""
        path = list(text[-2:])
        while len(path) < self.depth + 2 and (follower := self._after.get((path[-2], path[-1]))) is not None:
            path.append(follower)
        return path[2:]

    def _guessed(self, position: int, token: int) -> list[int]:
        """The path of guesses from a token on: the one behind that very token, else the position's newest."""
        path: list[int] = []
        while len(path) < self.depth and (known := self._guesses.get(position)):
            token = known.get(token, next(reversed(known.values())))
            path.append(token)
            position += 1
        return path

    def _chained(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        path = tail[: self.depth]
        while len(path) < self.depth and (tails := self._behind.get(path[-1])):
            path = (*path, *next(reversed(tails)))[: self.depth]
        return path
