"""A draft source of a user's own, in one file: it proposes the newest token over and over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lp.checks import check_count
from lp.config import LookaheadConfig, windowless
from lp.draft.registry import register_source
from lp.draft.source import DraftSource, TokenPrice
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatConfig:
    """Propose the newest token `num_tokens` times."""

    num_tokens: int = 4

    def __post_init__(self) -> None:
        check_count(self, "num_tokens", 1, 64, "try 4")

    def shape(self) -> LookaheadConfig:
        """The step it takes."""
        return windowless(self.num_tokens)


@register_source("test_repeat", RepeatConfig)
class Repeat(DraftSource):
    """Texts that loop on one token are what it is right about."""

    def __init__(self, config: RepeatConfig, prompt: Sequence[int]) -> None:
        self.config = config

    def propose(self, text: Sequence[int], budget: int, window: WindowDrafts, price: TokenPrice | None) -> DraftTree:
        """One path."""
        count = min(self.config.num_tokens, budget)
        return DraftTree([text[-1]] * count, list(range(-1, count - 1)))
