"""Token recycling (arXiv 2408.08696): drafts from the logits last seen behind every token."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from lp.config import RecyclingConfig
from lp.draft.source import StepSamples
from lp.draft.tree import DraftTree
from lp.sampling.top_logits import TopLogits


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
        self.config, self.num_logits = config, config.successors
        self._successors: dict[int, list[int]] = {}  # likeliest first

    def propose(self, text: Sequence[int], budget: int, *_: object) -> DraftTree:
        """The static tree, filled as far as successors are known."""
        places: list[int | None] = []
        tree = DraftTree(budget)
        for parent, rank in _static_tree(min(self.config.nodes, budget), self.config.successors):
            node = places[parent] if parent >= 0 else -1
            known = [] if node is None else self._successors.get(text[-1] if node < 0 else tree.tokens[node], [])
            places.append(tree.add_child(node, known[rank]) if node is not None and rank < len(known) else None)
        return tree

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """The prompt's rows leave their tokens' successors."""
        self._learn(prompt[:-1], top_logits)

    def observe(self, text: Sequence[int], moved: int, seen: StepSamples) -> None:
        """Every row read replaces its token's successors."""
        self._learn([seen.tokens[slot] for slot in seen.nodes], seen.top_logits)

    def _learn(self, tokens: Sequence[int], top_logits: TopLogits) -> None:
        self._successors.update(zip(tokens, top_logits.tokens.tolist(), strict=True))
