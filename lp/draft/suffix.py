"""Suffix decoding (arXiv 2411.04975), with the suffix tree from the optional package arctic-inference."""

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
    """Settings of suffix decoding (`decoder=suffix`), named as in arctic-inference.

    A step drafts the most frequent continuation after earlier occurrences of the text's last tokens.

    Args:
        max_tree_depth: most tokens of a path in the suffix tree: the matched tokens and what follows them.
        max_tokens: most draft tokens of a step.
        max_spec_factor, max_spec_offset: a match of m tokens may propose max_spec_factor x m + max_spec_offset.
        min_token_prob: least probability of a draft token, 0 to 1, estimated by how often its path followed the match.
        tree: whether to draft a tree, the likeliest tokens first; False drafts only the likeliest path.

    Raises:
        ValueError: a value is out of range; the message names the limit and a remedy.
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
        """Return lookahead settings that describe the step size: no window, at most `max_tokens` draft tokens."""
        return windowless(self.max_tokens)


def native_tree() -> Any:
    """Import the class `SuffixTree` from arctic-inference, an optional package.

    Raises:
        ValueError: the package is not installed; the message says how to install it.
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
    """Draft source that finds earlier occurrences of the text's last tokens, and drafts the most frequent continuation.

    It indexes one text, like the local tree of arctic-inference's SuffixDecodingCache. It does not index earlier
    responses.

    Args:
        config: settings: how many tokens to match and to draft.
        prompt: token ids of the prompt, which are indexed from the start.

    Raises:
        ValueError: arctic-inference is not installed.
    """

    def __init__(self, config: SuffixConfig, prompt: Sequence[int]) -> None:
        self.config = config
        self._native = native_tree()(config.max_tree_depth)
        self._native.extend(0, list(prompt))

    def propose(self, text: Sequence[int], budget: int, *_: object) -> DraftTree:
        """Draft the continuation that promises most accepted tokens, by the estimated probabilities of its tokens.

        Continuations of shorter and longer matches compete with each other.

        Args:
            text: token ids of the prompt and the generated tokens.
            budget: most draft tokens.
        """
        config = self.config
        draft = self._native.speculate(
            list(text[-config.max_tree_depth :]),
            min(config.max_tokens, budget),
            config.max_spec_factor,
            config.max_spec_offset,
            config.min_token_prob,
            config.tree,
        )
        return DraftTree(draft.token_ids, draft.parents)  # parents come first, and siblings differ

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Add the text's new tokens to the suffix tree.

        Args:
            text: token ids of the prompt and the generated tokens.
            num_new: number of tokens at the end of `text` that the step generated.
            samples: not used.
        """
        self._native.extend(0, list(text[len(text) - num_new :]))
