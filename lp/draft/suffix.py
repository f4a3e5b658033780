"""Suffix decoding (arXiv 2411.04975) over the suffix tree of arctic-inference, an optional package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lp.config import SuffixConfig
from lp.draft.source import StepSamples
from lp.draft.tree import DraftTree
from lp.sampling.top_logits import TopLogits


def native_tree() -> Any:
    """arctic-inference's `SuffixTree`.

    Raises:
        ValueError: it is not installed.
    """
    try:
        from arctic_inference.suffix_decoding._C import SuffixTree as native
    except ImportError as error:
        raise ValueError(
            f"suffix decoding needs the suffix tree of arctic-inference ({error}); pip install arctic-inference, or "
            "build the tree alone with scripts/build_suffix_tree.sh"
        ) from None
    return native


class SuffixTree:
    """What followed the longest matches of the last tokens, by frequency.

    The tree is that of one text: what SuffixDecodingCache keeps of a request, without its tree of past responses.

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

    num_logits = 0

    def propose(self, text: Sequence[int], budget: int, *_: object) -> DraftTree:
        """The continuation whose estimated probabilities add up to most, over all lengths of the match."""
        config, tree = self.config, DraftTree(budget)
        draft = self._native.speculate(
            list(text[-config.max_tree_depth :]),
            min(config.max_tokens, budget),
            config.max_spec_factor,
            config.max_spec_offset,
            config.min_token_prob,
            config.tree,
        )
        for token, parent in zip(draft.token_ids, draft.parents, strict=True):
            tree.add_child(parent, token)  # nodes keep their places: parents come first, and no token twice behind one
        return tree

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """Nothing: it reads no logits."""

    def observe(self, text: Sequence[int], moved: int, seen: StepSamples) -> None:
        """Index the new tokens."""
        self._native.extend(0, list(text[len(text) - moved :]))
