"""What each rank of a step computes: its columns of the window, and its share of the draft tree. Pure arithmetic.

Every rank has a budget of B step tokens. From it go its catch-up tokens, `c`, and its nodes of the window; what is left
is its room for draft tokens. R: ranks; W: columns; N: n-gram size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from lp.config import LookaheadConfig
from lp.draft.tree import DraftTree
from lp.draft.window import slice_window


def step_tokens(config: LookaheadConfig, ranks: int = 1) -> int:
    """B, the most step tokens of a rank.

    The W and G of an adaptive config are a rank's. Fixed ones are of the whole step: every rank gets an equal part.
    """
    w, n = config.window_size, config.ngram_size
    if config.adaptive:
        ranks = 1

    def fits(budget: int) -> bool:
        slices = slice_window(w, n, (budget,) * ranks)
        window = sum(each.num_nodes for each in slices)
        return slices[-1].end == w and window + config.draft_budget <= ranks * budget

    sizes = range(1, max(w, 1) + w * (n - 2) + config.draft_budget)
    return 1 + bisect_left(sizes, True, key=fits)


NO_DRAFT = DraftTree()


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank drafts in a step.

    Attributes:
        draft: its own part of the step's draft tree, with the ancestors that it needs.
        common: what all ranks grew alike before they divided it, which the digest compares.
    """

    draft: DraftTree
    common: DraftTree = NO_DRAFT


def cut_tree(tree: DraftTree, budget: int, base_tokens: Sequence[int], rank: int) -> Share:
    """A rank's share of a whole tree: preorder, cut into one block a rank so that the largest step is the smallest.

    A rank computes the nodes of its block and their ancestors. Nodes that find no room are left out.

    Args:
        tree: the same on every rank.
        budget: B.
        base_tokens: by rank, step tokens that it has without a draft.
        rank: the rank whose share is wanted.

    Raises:
        ValueError: as `DraftTree.check`.
    """
    tree.check()
    if len(base_tokens) == 1:
        return Share(tree)
    deepest = budget - min(base_tokens)
    paths = [path for path in _preorder_paths(list(tree.parents)) if len(path) <= deepest]
    sizes = range(max(base_tokens), budget)
    largest = bisect_left(sizes, len(paths), key=lambda size: _divide(paths, size, base_tokens)[1])
    size = min(sizes.start + largest, budget)
    kept = sorted(_divide(paths, size, base_tokens)[0][rank])
    index = {node: position for position, node in enumerate(kept)}
    draft = DraftTree(
        tokens=[tree.tokens[node] for node in kept],
        parents=[index.get(tree.parents[node], -1) for node in kept],
        accept_probs=[tree.accept_probs[node] for node in kept] if tree.accept_probs else (),
        merge=tree.merge,
    )
    return Share(draft, tree)


def _preorder_paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The path of every node, from the root's child down to the node itself, in preorder."""
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        paths.append((*paths[parent], node) if parent >= 0 else (node,))
    return sorted(paths)


def _divide(paths: Sequence[tuple[int, ...]], size: int, base_tokens: Sequence[int]) -> tuple[list[set[int]], int]:
    """Divide paths into steps of at most `size` tokens: each rank's nodes, and how many paths have found room."""
    shares = []
    at = 0
    for base in base_tokens:
        share: set[int] = set()
        while at < len(paths) and len(share.union(paths[at])) <= size - base:
            share.update(paths[at])
            at += 1
        shares.append(share)
    return shares, at
