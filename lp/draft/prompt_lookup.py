"""Prompt lookup decoding, a baseline: drafts a copy of the tokens after the first occurrence of the last tokens."""

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
        ValueError: a value is out of range; the message names the limit and a remedy.
    """

    max_matching_ngram: int = 2
    num_tokens: int = 10

    def __post_init__(self) -> None:
        check_count(self, "max_matching_ngram", 1, 64, "try 2")
        check_count(self, "num_tokens", 1, 1024, "try 10")

    def shape(self) -> LookaheadConfig:
        """Return lookahead settings that describe the step size: no window, at most `num_tokens` draft tokens."""
        return windowless(self.num_tokens)


@register_source("prompt_lookup", PromptLookupConfig)
class PromptLookup(DraftSource):
    """Draft source that copies the tokens after the first occurrence of the text's last tokens, as transformers does.

    Args:
        config: settings: how many of the last tokens to search for, and how many tokens to copy.
        prompt: token ids of the prompt, which are searched from the start.
    """

    def __init__(self, config: PromptLookupConfig, prompt: Sequence[int]) -> None:
        self.config = config
        self._first: dict[tuple[int, ...], int] = {}  # n-gram -> where its earliest continuation starts
        self._index(prompt, len(prompt))

    def propose(self, text: Sequence[int], budget: int, *_: object) -> DraftTree:
        """Draft a copy of the tokens that follow the longest match of the text's last tokens, as one path.

        The tree is empty if there is no match.

        Args:
            text: token ids of the prompt and the generated tokens.
            budget: most tokens to copy.
        """
        for n in range(min(self.config.max_matching_ngram, len(text)), 0, -1):
            start = self._first.get(tuple(text[-n:]))
            if start is not None:
                copied = list(text[start : start + budget])
                return DraftTree(copied, list(range(-1, len(copied) - 1)))
        return DraftTree()

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Make the text's new tokens searchable.

        Args:
            text: token ids of the prompt and the generated tokens.
            num_new: number of tokens at the end of `text` that the step generated.
            samples: not used.
        """
        self._index(text, num_new)

    def _index(self, text: Sequence[int], num_new: int) -> None:
        for end in range(max(len(text) - num_new, 1), len(text)):
            for n in range(1, min(self.config.max_matching_ngram, end) + 1):
                self._first.setdefault(tuple(text[end - n : end]), end)
