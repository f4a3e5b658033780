"""Peers of the pool behind the same protocol: what others published, as they published it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lp.config import PaperConfig, RecyclingConfig
from lp.lookahead.candidates import StepReads, TokenTree


class PromptLookup:
    """Copy what followed the earliest occurrence of the last tokens, as transformers' prompt lookup does.

    Args:
        max_matching_ngram: longest run of last tokens to look for.
        prompt: the text to index at first.
    """

    def __init__(self, max_matching_ngram: int, prompt: Sequence[int]) -> None:
        self.max_matching_ngram = max_matching_ngram
        self._first: dict[tuple[int, ...], int] = {}  # n-gram -> where its earliest continuation starts
        self._index(prompt, len(prompt))

    harvest = 0

    def propose(self, text: Sequence[int], budget: int, *_: object) -> TokenTree:
        """One path: at most `budget` tokens behind the longest run found."""
        tree = TokenTree(budget)
        for n in range(min(self.max_matching_ngram, len(text)), 0, -1):
            start = self._first.get(tuple(text[-n:]))
            if start is not None:
                tree.add(text[start : start + budget])
                break
        return tree

    def begin(self, prompt: Sequence[int], harvest: np.ndarray) -> None:
        """Nothing: it reads no logits."""

    def observe(self, text: Sequence[int], moved: int, seen: StepReads) -> None:
        """Index the runs that the new tokens gave a continuation."""
        self._index(text, moved)

    def _index(self, text: Sequence[int], moved: int) -> None:
        for end in range(max(len(text) - moved, 1), len(text)):
            for n in range(1, min(self.max_matching_ngram, end) + 1):
                self._first.setdefault(tuple(text[end - n : end]), end)


class PaperPool:
    """The paper's pool (section 3.2): the newest n-grams behind one token, as many paths side by side.

    Args:
        config: N, and G n-grams kept of a token and tried a step.
        prompt: its n-grams are known from the start, if wanted.
    """

    harvest = 0

    def __init__(self, config: PaperConfig, prompt: Sequence[int]) -> None:
        self.config = config
        self._behind: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> tails (N-1), newest last
        self._learn_text(prompt, len(prompt))

    def propose(self, text: Sequence[int], budget: int, *_: object) -> TokenTree:
        """The newest n-grams behind text[-1]; no two share a row."""
        tree = TokenTree(budget, shared=False)
        for tail in reversed(self._behind.get(text[-1], {})):
            tree.add(tail)
        return tree

    def begin(self, prompt: Sequence[int], harvest: np.ndarray) -> None:
        """Nothing: it reads no logits."""

    def observe(self, text: Sequence[int], moved: int, seen: StepReads) -> None:
        """The window's n-grams, then the text's."""
        for ngram in seen.ngrams:
            self._add(ngram)
        self._learn_text(text, moved)

    def _learn_text(self, text: Sequence[int], moved: int) -> None:
        n = self.config.ngram_size
        if self.config.prompt_ngrams:
            for end in range(max(len(text) - moved + 1, n), len(text) + 1):
                self._add(text[end - n : end])

    def _add(self, ngram: Sequence[int]) -> None:
        tails = self._behind.setdefault(ngram[0], {})
        tail = tuple(ngram[1:])
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self.config.guess_set_size:
            del tails[next(iter(tails))]


@lru_cache(maxsize=16)
def _static_tree(nodes: int, successors: int) -> list[tuple[int, int]]:
    """(parent, rank) of every node: likeliest first if a successor of rank r is right once in 2^(r+1) times."""
    tree: list[tuple[int, int]] = []
    heap = [(rank + 1, 0, -1, rank) for rank in range(successors)]  # halvings, tie-break, parent, rank
    while heap and len(tree) < nodes:
        halvings, _, parent, rank = heapq.heappop(heap)
        tree.append((parent, rank))
        for below in range(successors):
            heapq.heappush(heap, (halvings + below + 1, len(tree), len(tree) - 1, below))
    return tree


class TokenRecycling:
    """Token recycling: the likeliest successors that the logits of any row last showed behind a token.

    Args:
        config: successors kept, nodes of the static tree.
    """

    def __init__(self, config: RecyclingConfig) -> None:
        self.config, self.harvest = config, config.successors
        self._successors: dict[int, list[int]] = {}  # likeliest first

    def propose(self, text: Sequence[int], budget: int, *_: object) -> TokenTree:
        """The static tree, filled as far as successors are known."""
        places: list[int | None] = []
        tree = TokenTree(budget)
        for parent, rank in _static_tree(min(self.config.nodes, budget), self.config.successors):
            node = places[parent] if parent >= 0 else -1
            known = [] if node is None else self._successors.get(text[-1] if node < 0 else tree.tokens[node], [])
            places.append(tree.grow(node, known[rank]) if node is not None and rank < len(known) else None)
        return tree

    def begin(self, prompt: Sequence[int], harvest: np.ndarray) -> None:
        """The prompt's rows leave their tokens' successors."""
        self._learn(prompt[:-1], harvest)

    def observe(self, text: Sequence[int], moved: int, seen: StepReads) -> None:
        """Every row read replaces its token's successors."""
        self._learn([seen.tokens[slot] for slot in seen.slots], seen.harvest)

    def _learn(self, tokens: Sequence[int], harvest: np.ndarray) -> None:
        logits = np.ascontiguousarray(harvest).view(np.float32)[:, ::2]
        ranked = np.take_along_axis(harvest >> 32, np.argsort(-logits, axis=1, kind="stable"), axis=1).tolist()
        self._successors.update(zip(tokens, ranked, strict=True))
