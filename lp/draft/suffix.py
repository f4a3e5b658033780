"""Suffix decoding (arXiv 2411.04975) over the suffix tree of arctic-inference, an optional package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lp.checks import check_count, check_real, set_field
from lp.commands import in_clone
from lp.config import LookaheadConfig, windowless
from lp.draft.registry import register_source
from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree
from lp.errors import UserError
from lp.removed_keys import RefusesRemoved


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig(RefusesRemoved):
    """Suffix decoding as arctic-inference has it: continue as the text did behind its last tokens, by frequency.

    Args:
        max_tree_depth: tokens of the longest path in the suffix tree: a match and what follows it.
        max_tokens: most draft tokens of a step.
        max_spec_factor, max_spec_offset: a match of m tokens may propose max_spec_factor x m + max_spec_offset.
        min_token_prob: a token rarer than this behind the match, by its path's frequency, is not proposed.
        tree: propose a tree, best first; False proposes the likeliest path.

    Raises:
        ValueError: a value out of range, with the limit and the remedy.
    """

    max_tree_depth: int = 64
    max_tokens: int = 32
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    tree: bool = False

    def __post_init__(self) -> None:
        check_count(self, "max_tree_depth", 2, 4096, "try 64")
        check_count(self, "max_tokens", 1, 1024, "try 32")
        set_field(self, "max_spec_factor", check_real("max_spec_factor", self.max_spec_factor, 0, 1024, "try 1.0"))
        set_field(self, "max_spec_offset", check_real("max_spec_offset", self.max_spec_offset, -1024, 1024, "try 0.0"))
        set_field(self, "min_token_prob", check_real("min_token_prob", self.min_token_prob, 0, 1, "try 0.1"))
        if not isinstance(self.tree, bool):
            raise UserError(f"tree is {self.tree!r}; it must be true or false; false proposes a path")

    def shape(self) -> LookaheadConfig:
        """The W, N, G whose step the method takes."""
        return windowless(self.max_tokens)


def native_tree() -> Any:
    """arctic-inference's `SuffixTree`.

    Raises:
        ValueError: it is not installed.
    """
    try:
        from arctic_inference.suffix_decoding._C import SuffixTree as native
    except ImportError as error:
        alone = ", or build the tree alone with scripts/build_suffix_tree.sh" if in_clone() else ""
        raise UserError(
            f"suffix decoding needs the suffix tree of arctic-inference ({error}); pip install arctic-inference{alone}"
        ) from None
    return native


@register_source("suffix", SuffixConfig, requires=native_tree)
class SuffixTree(DraftSource):
    """What followed the longest matches of the last tokens, by frequency.

    The tree is that of one text: what SuffixDecodingCache has of a request, without its tree of past responses.

    Args:
        config: how far to match and to propose.
        prompt: the text to index at first.

    Raises:
        ValueError: arctic-inference is not installed.
    """

    def __init__(self, config: SuffixConfig, prompt: Sequence[int]) -> None:
        self.config = config
        self._native = native_tree()(config.max_tree_depth)
        self._native.extend(0, list(prompt))

    def propose(self, text: Sequence[int], budget: int, *_: object) -> DraftTree:
        """The continuation whose estimated probabilities add up to most, over all lengths of the match."""
        config = self.config
        draft = self._native.speculate(
            list(text[-config.max_tree_depth :]),
            min(config.max_tokens, budget),
            config.max_spec_factor,
            config.max_spec_offset,
            config.min_token_prob,
            config.tree,
        )
        return DraftTree(draft.token_ids, draft.parents)  # parents come first, and no token twice behind one

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Index the new tokens."""
        self._native.extend(0, list(text[len(text) - num_new :]))
