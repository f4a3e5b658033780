"""What each rank computes in a decode step: how many tokens at most, and which part of the draft tree.

Every rank has a budget of B step tokens. It is used first for catch-up tokens (accepted tokens whose KV the rank
lacks), for `c` (the newest token of the text), and for the rank's nodes of the lookahead window. The rest is the rank's
room for draft tokens. All functions here are pure arithmetic.
R: number of ranks; W: number of window columns; N: n-gram size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from lp.config import LookaheadConfig
from lp.draft.tree import DraftTree
from lp.draft.window import slice_window


def step_tokens(config: LookaheadConfig, ranks: int = 1) -> int:
    """B, the most tokens that one rank computes in a decode step.

    Args:
        config: settings with the window size W and the guess set size G, which hold for each rank if the budget is
            adaptive, and for all ranks together if it is fixed.
        ranks: R, number of ranks; they divide a fixed budget among them.
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
    """One rank's part of a step's draft tree.

    Attributes:
        draft: nodes that this rank computes: its part of the tree, and the ancestors of these nodes.
        common: tree that all ranks proposed before they divided it; each rank's message contains a digest of it, which
            shows whether all ranks proposed the same tree.
    """

    draft: DraftTree
    common: DraftTree = NO_DRAFT


def cut_tree(tree: DraftTree, budget: int, base_tokens: Sequence[int], rank: int) -> Share:
    """Divide a draft tree among ranks so that the largest rank's step is as small as possible; returns one rank's part.

    The nodes are listed in preorder and cut into one block for each rank. A rank computes the nodes of its block and
    their ancestors. Nodes for which no rank has room are left out.

    Args:
        tree: the whole draft tree, the same on every rank.
        budget: B, the most step tokens of a rank.
        base_tokens: (R,), number of step tokens that each rank has without draft tokens.
        rank: the rank whose part is returned.

    Raises:
        ValueError: the tree is malformed, see `DraftTree.check`.
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
        accept_probs=[tree.accept_probs[node] for node in kept] if len(tree.accept_probs) else (),
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
    """Fill ranks with paths, up to `size` step tokens each: each rank's nodes, and how many paths had room."""
    shares = []
    at = 0
    for base in base_tokens:
        share: set[int] = set()
        while at < len(paths) and len(share.union(paths[at])) <= size - base:
            share.update(paths[at])
            at += 1
        shares.append(share)
    return shares, at
