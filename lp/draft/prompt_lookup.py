"""Prompt lookup: copy what followed the last tokens before, as transformers does."""

from __future__ import annotations

from collections.abc import Sequence

from lp.draft.source import StepSamples
from lp.draft.tree import DraftTree
from lp.sampling.top_logits import TopLogits


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

    num_logits = 0

    def propose(self, text: Sequence[int], budget: int, *_: object) -> DraftTree:
        """One path: at most `budget` tokens behind the longest run found."""
        tree = DraftTree(budget)
        for n in range(min(self.max_matching_ngram, len(text)), 0, -1):
            start = self._first.get(tuple(text[-n:]))
            if start is not None:
                tree.add_path(text[start : start + budget])
                break
        return tree

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """Nothing: it reads no logits."""

    def observe(self, text: Sequence[int], moved: int, seen: StepSamples) -> None:
        """Index the runs that the new tokens gave a continuation."""
        self._index(text, moved)

    def _index(self, text: Sequence[int], moved: int) -> None:
        for end in range(max(len(text) - moved, 1), len(text)):
            for n in range(1, min(self.max_matching_ngram, end) + 1):
                self._first.setdefault(tuple(text[end - n : end]), end)
