"""Verification: merge all ranks' trees into their union, and walk to find the accepted tokens (Algorithm 3).

A draft token is accepted where the model itself sampled that very token behind an accepted one.

Several ranks may have computed the same node, a path of tokens behind `c`. Of these the lowest rank speaks: its sample
counts. Who speaks depends on the trees alone, never on what was sampled, so every walked token has the distribution
that the model gives it, however its sampler draws: the longest of the ranks' own walks would not have it.

R: ranks; B: nodes of a rank, at most; P: nodes of the accepted path, `c` (the newest token of the text) included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lp.compiled import compiled_array, compiled_zeros, jit
from lp.draft.layout import add_child, child_with
from lp.draft.window import WindowSlices
from lp.sampling.top_logits import INVALID_TOKEN


class RankTrees(NamedTuple):
    """The trees that all ranks computed in a step, as read from their messages: the input of `UnionTree.merge`.

    All attributes are arrays as compiled functions take them. Each rank numbers its nodes itself, `c` first.

    Attributes:
        parents: int64 (R, B), the parent of every node by that rank's numbers.
        tokens: int64 (R, B), the token of every node.
        sampled: int64 (R, B), the token sampled at every node; INVALID_TOKEN if none was.
        probs: float64 (R, B), the probability that a draft token and all its ancestors are accepted; 0 if none is
            stated.
        counts: int64 (R,), number of nodes of each rank; entries of the other arrays beyond it mean nothing.
        logits_at: int64 (3,), (a, b, c): in the messages, the packed top-k logits of node i of rank r begin at index
            a + b * r + c * i.
    """

    parents: Any
    tokens: Any
    sampled: Any
    probs: Any
    counts: Any
    logits_at: Any

    @classmethod
    def room(cls, ranks: int, budget: int, logits_at: Sequence[int] = (0, 0, 0)) -> RankTrees:
        """Allocate arrays for the trees of `ranks` ranks with at most `budget` nodes each."""
        ints = np.zeros((3, ranks, budget), np.int64)
        counts = np.zeros(ranks, np.int64)
        arrays = (*ints, np.zeros((ranks, budget)), counts, np.array(logits_at, np.int64))
        return cls(*map(compiled_array, arrays))


class Outcome(NamedTuple):
    """The result of verification: the tokens that a step generated; equal on every rank but for `own_path`.

    Attributes:
        path: (P,), nodes of the union from `c` to the last accepted one.
        tokens: (P,), the generated tokens: the accepted draft tokens, then the bonus token.
        accepted: number of accepted draft tokens, P - 1.
        held: (R,), how many nodes of the path each rank computed, and has the KV of; these are the first of the path.
        own_path: the nodes of the path that this rank computed, by its own numbers.
        expected: how many draft tokens should have been accepted along the path by their stated probabilities, each
            given that the one before it was.
        accepted_drafts: how many of the accepted tokens had a stated probability.
    """

    path: list[int]
    tokens: list[int]
    accepted: int
    held: list[int]
    own_path: list[int]
    expected: float
    accepted_drafts: int


class UnionTree:
    """The union of all ranks' trees of a step: `merge` makes it, `walk` finds the accepted tokens in it.

    A node that several ranks computed is one node here, and has the sample of the lowest of these ranks. The arrays
    are overwritten in the next step.

    Args:
        ranks: R, number of ranks.
        budget: B, most nodes of a rank.

    Attributes:
        num_nodes: number of nodes of the union.
        num_draft: how many of these are draft tokens and not part of a rank's window.
        tokens, parents, depths: int64 (num_nodes,), every node's token, parent, and distance from `c`, which is node 0
            and has parent -1.
        sampled: int64 (num_nodes,), the token sampled at each node; INVALID_TOKEN if none was.
        sources: int64 (num_nodes,), rank * B + node: the rank whose sample counts, and its own number of the node.
        starts: int64 (num_nodes,), index in the messages at which this node's packed top-k logits begin.
    """

    def __init__(self, ranks: int, budget: int) -> None:
        self.budget = budget
        size = ranks * budget
        self._ints = np.zeros((9, size), np.int64)
        self._nodes = _Nodes(*map(compiled_array, (*self._ints, np.zeros(size))))
        path, tokens, own = (compiled_zeros(size + 1, "i8") for _ in range(3))
        self._found = _Found(path, tokens, own, compiled_zeros(ranks, "i8"))

    def merge(self, trees: RankTrees, slices: WindowSlices, window_drafts: bool) -> None:
        """Replace the union by that of a new step.

        Args:
            trees: the trees that the ranks computed.
            slices: the window columns of each rank.
            window_drafts: whether the window's level 0 and column 0 count as draft tokens, which may be accepted.
        """
        self._counts = trees.counts
        self.num_nodes, self.num_draft = _merge(
            self._nodes, trees, slices.shapes, slices[0].levels, self.budget, window_drafts
        )
        arrays = self._ints[:6, : self.num_nodes]
        self.tokens, self.parents, self.depths, self.sampled, self.sources, self.starts = arrays

    def walk(self, rank: int, most: int) -> Outcome:
        """Find the accepted tokens: from `c`, go on to the child that has the sampled token, until there is none.

        Greedy, coupled and rejection sampling differ only in how a node samples its token (`lp.sampling.sampler`): each
        sample has the model's own distribution given the node's path, so the walked tokens have it too.

        Args:
            rank: this rank, for `Outcome.own_path`.
            most: most draft tokens to accept.
        """
        found = self._found
        length, expected, accepted_drafts = _walk(self._nodes, self._counts, self.budget, rank, most, found)
        held: list[int] = found.held.tolist()
        return Outcome(
            path=found.path[:length].tolist(),
            tokens=found.tokens[:length].tolist(),
            accepted=length - 1,
            held=held,
            own_path=found.own[: held[rank]].tolist(),
            expected=expected,
            accepted_drafts=accepted_drafts,
        )

    def speaker(self, node: int) -> int:
        """The rank whose sample counts at a node of the union: the lowest that computed it."""
        return int(self.sources[node]) // self.budget

    def stated_probs(self) -> np.ndarray:
        """All stated accept probabilities of the step's draft tokens, the largest first: float64, one-dimensional."""
        probs = np.asarray(self._nodes.probs)[: self.num_nodes]
        return np.sort(probs[probs > 0])[::-1]


class _Nodes(NamedTuple):
    """Room for the nodes of a union, `c` first, parents before children."""

    tokens: Any  # int64 (R * B,), like all but the last
    parents: Any
    depths: Any
    sampled: Any
    sources: Any
    starts: Any
    first_child: Any  # -1 for none; children that a walk may take
    next_sibling: Any
    node_of: Any  # by rank * B + the rank's own node number: the node of the union
    probs: Any  # float64 (R * B,)


class _Found(NamedTuple):
    """Room for what a walk finds; see `Outcome`."""

    path: Any  # int64 (R * B + 1,), like the next two
    tokens: Any
    own: Any
    held: Any  # int64 (R,)


@jit
def _merge(nodes, trees, slices, levels, budget, window_drafts):  # type: ignore[no-untyped-def]
    """Merge the trees into `nodes`; returns the number of nodes, and how many of them are in no rank's window."""
    num_nodes = num_draft = 0
    for rank in range(len(trees.counts)):
        first, columns, level_0 = slices[rank, 0], slices[rank, 1], slices[rank, 2]
        window = level_0 + columns * (levels - 1)
        for index in range(trees.counts[rank]):
            at = rank * budget + index
            parent = node = -1
            on_walk = True
            if index > 0:
                parent = nodes.node_of[rank * budget + trees.parents[rank, index]]
                if index < window:
                    below = index - level_0  # nodes of lower levels are column by column
                    on_walk = window_drafts and (below < 0 or first + below % max(columns, 1) == 0)
                if on_walk:
                    node = child_with(nodes, parent, trees.tokens[rank, index])
            elif num_nodes > 0:
                node = 0
            if node < 0:
                node = num_nodes
                num_nodes += 1
                num_draft += 1 if index >= window else 0
                nodes.tokens[node] = trees.tokens[rank, index]
                nodes.parents[node] = parent
                nodes.depths[node] = nodes.depths[parent] + 1 if index > 0 else 0
                nodes.sampled[node] = trees.sampled[rank, index]
                nodes.probs[node] = 0.0
                nodes.sources[node] = at
                nodes.starts[node] = trees.logits_at[0] + trees.logits_at[1] * rank + trees.logits_at[2] * index
                nodes.first_child[node] = -1
                if index > 0 and on_walk:
                    add_child(nodes, parent, node)
            if nodes.probs[node] == 0.0:
                nodes.probs[node] = trees.probs[rank, index]
            nodes.node_of[at] = node
    return num_nodes, num_draft


@jit
def _walk(nodes, counts, budget, own_rank, most, found):  # type: ignore[no-untyped-def]
    """Fill `found`; returns the path's length, and `expected` and `accepted_drafts` as in Outcome."""
    node = 0
    length = 0
    expected = 0.0
    accepted_drafts = 0
    above = 1.0  # probability of the node; 0 once the path has left the draft tokens that state one
    while True:
        found.path[length] = node
        found.tokens[length] = nodes.sampled[node]
        length += 1
        if above > 0:
            child = nodes.first_child[node]
            while child >= 0:
                expected += nodes.probs[child] / above
                child = nodes.next_sibling[child]
        node = child_with(nodes, node, nodes.sampled[node])
        if length > most or node < 0 or nodes.sampled[node] == INVALID_TOKEN:
            break
        above = nodes.probs[node] if above > 0 else 0.0
        if above > 0:
            accepted_drafts += 1
    _find_held(nodes, counts, budget, found.path, length, own_rank, found.held, found.own)
    return length, expected, accepted_drafts


@jit
def _find_held(nodes, counts, budget, path, length, own_rank, held, local):  # type: ignore[no-untyped-def]
    """Count the nodes of the path that each rank computed (`held`), and list those of `own_rank` (`local`)."""
    for rank in range(len(counts)):
        held[rank] = 0
        for index in range(counts[rank]):
            node = nodes.node_of[rank * budget + index]
            depth = nodes.depths[node]
            if depth < length and path[depth] == node and depth == held[rank]:
                held[rank] = depth + 1
                if rank == own_rank:
                    local[depth] = index
