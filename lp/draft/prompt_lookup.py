"""Prompt lookup decoding, a baseline: draft a copy of what followed the last tokens at their first occurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lp.checks import check_count
from lp.config import LookaheadConfig, windowless
from lp.draft.registry import register_source
from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree
from lp.removed_keys import RefusesRemoved


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookupConfig(RefusesRemoved):
    """Settings of prompt lookup decoding (`decoder=prompt_lookup`), named as in transformers.

    Args:
        max_matching_ngram: most tokens at the end of the text to search for; if they do not occur, fewer are tried.
        num_tokens: most tokens to copy: the draft tokens of a step.

    Raises:
        ValueError: a value out of range, with the limit and the remedy.
    """

    max_matching_ngram: int = 2
    num_tokens: int = 10

    def __post_init__(self) -> None:
        check_count(self, "max_matching_ngram", 1, 64, "try 2")
        check_count(self, "num_tokens", 1, 1024, "try 10")

    def shape(self) -> LookaheadConfig:
        """Lookahead settings with the same step sizes: no window, `num_tokens` draft tokens."""
        return windowless(self.num_tokens)


@register_source("prompt_lookup", PromptLookupConfig)
class PromptLookup(DraftSource):
    """Draft source that copies what followed the earliest occurrence of the last tokens, as transformers does.

    Args:
        config: how many of the last tokens to search for.
        prompt: token ids to index from the start.
    """

    def __init__(self, config: PromptLookupConfig, prompt: Sequence[int]) -> None:
        self.config = config
        self._first: dict[tuple[int, ...], int] = {}  # n-gram -> where its earliest continuation starts
        self._index(prompt, len(prompt))

    def propose(self, text: Sequence[int], budget: int, *_: object) -> DraftTree:
        """Draft one path: a copy of at most `budget` tokens behind the longest match; empty if there is no match."""
        for n in range(min(self.config.max_matching_ngram, len(text)), 0, -1):
            start = self._first.get(tuple(text[-n:]))
            if start is not None:
                copied = list(text[start : start + budget])
                return DraftTree(copied, list(range(-1, len(copied) - 1)))
        return DraftTree()

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Index the text's `num_new` newest tokens by the n-grams before each."""
        self._index(text, num_new)

    def _index(self, text: Sequence[int], num_new: int) -> None:
        for end in range(max(len(text) - num_new, 1), len(text)):
            for n in range(1, min(self.config.max_matching_ngram, end) + 1):
                self._first.setdefault(tuple(text[end - n : end]), end)
