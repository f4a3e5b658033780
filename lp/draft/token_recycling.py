"""Token recycling (arXiv 2408.08696), a baseline: drafts from the top-k logits last computed at each token."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lp.checks import check_count
from lp.config import LookaheadConfig, windowless
from lp.draft.registry import register_source
from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree
from lp.removed_keys import RefusesRemoved
from lp.sampling.top_logits import TopLogits


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingConfig(RefusesRemoved):
    """Settings of token recycling (`decoder=token_recycling`).

    The draft tree always has the same shape. Its nodes are filled with the successors that are stored for each token.

    Args:
        successors: how many likeliest successors are stored for each token of the vocabulary.
        nodes: nodes of the tree: the most draft tokens of a step.

    Raises:
        ValueError: a value is out of range; the message names the limit and a remedy.
    """

    successors: int = 8
    nodes: int = 80

    def __post_init__(self) -> None:
        check_count(self, "successors", 1, 256, "try 8")
        check_count(self, "nodes", 1, 1024, "try 80")

    def shape(self) -> LookaheadConfig:
        """Return lookahead settings that describe the step size: no window, at most `nodes` draft tokens."""
        return windowless(self.nodes)


@lru_cache(maxsize=16)
def _static_tree(nodes: int, successors: int) -> list[tuple[int, int]]:
    """(parent, rank) of every node, likeliest first if the successor of rank r is right with probability 2^-(r+1)."""
    tree: list[tuple[int, int]] = []
    heap = [(rank + 1, 0, -1, rank) for rank in range(successors)]  # halvings, tie-break, parent, rank
    while heap and len(tree) < nodes:
        halvings, _, parent, rank = heapq.heappop(heap)
        tree.append((parent, rank))
        for below in range(successors):
            heapq.heappush(heap, (halvings + below + 1, len(tree), len(tree) - 1, below))
    return tree


@register_source("token_recycling", RecyclingConfig)
class TokenRecycling(DraftSource):
    """Draft source of token recycling: drafts each token's likeliest successors, from the last logits at this token.

    Args:
        config: settings: number of successors of a token, and number of nodes in the draft tree.
        prompt: not used; `begin` stores the successors of the prompt's tokens.
    """

    def __init__(self, config: RecyclingConfig, prompt: Sequence[int] = ()) -> None:
        self.config = config
        self.num_logits = config.successors
        self._successors: dict[int, list[int]] = {}  # likeliest first

    def propose(self, text: Sequence[int], budget: int, *_: object) -> DraftTree:
        """Fill a draft tree of fixed shape with stored successors, beginning with those of the text's last token.

        A node is left out, with all nodes below it, if no successor is stored for its place.

        Args:
            text: token ids of the prompt and the generated tokens.
            budget: most draft tokens.
        """
        tokens: list[int] = []
        parents: list[int] = []
        nodes: list[int | None] = []  # of every static node, its node here
        for static_parent, rank in _static_tree(min(self.config.nodes, budget), self.config.successors):
            parent = nodes[static_parent] if static_parent >= 0 else -1
            nodes.append(None)  # where its token, or its parent's, is not known
            if parent is None:
                continue
            known = self._successors.get(tokens[parent] if parent >= 0 else text[-1], [])
            if rank < len(known):
                nodes[-1] = len(tokens)
                tokens.append(known[rank])
                parents.append(parent)
        return DraftTree(tokens, parents)

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """Store the likeliest successors of the prompt's tokens, from the logits that prefill computed.

        Args:
            prompt: last tokens of the prompt; earlier tokens have no logits: they were cached, or are not read.
            top_logits: top-k logits at each of these tokens but the last.
        """
        self._store(prompt[:-1], top_logits)

    def observe(self, text: Sequence[int], num_new: int, samples: StepSamples) -> None:
        """Store new likeliest successors for the token of every sampled node, from the logits at this node.

        Args:
            text: not used.
            num_new: not used.
            samples: tokens and logits at all nodes of the step.
        """
        self._store([int(samples.tokens[node]) for node in samples.nodes], samples.top_logits)

    def _store(self, tokens: Sequence[int], top_logits: TopLogits) -> None:
        self._successors.update(zip(tokens, top_logits.tokens.tolist(), strict=True))
