"""Verification: merges the trees of all ranks into one (the union), and walks it to find the accepted tokens.

This is Algorithm 3 of the paper. A draft token is accepted if the model itself sampled the same token after the
accepted token before it.

Several ranks may have computed the same node, that is, the same path of tokens after `c`. The sample of the lowest of
these ranks counts; this rank is called the node's speaker. The speaker depends only on the trees and never on sampled
tokens, so every accepted token has the distribution that the model gives it, whatever the sampling method. The
alternative, taking the rank that accepts most tokens, would change the distribution.

R: number of ranks; B: most nodes of a rank; P: number of nodes on the accepted path, including `c` (the newest token of
the text).
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
    """The trees that all ranks computed in a decode step, as read from their messages: the input of `UnionTree.merge`.

    All attributes are arrays for functions compiled by numba. Each rank numbers its own nodes from 0; node 0 is the
    newest token of the text.

    Attributes:
        parents: int64 (R, B), parent of every node, as the number that the same rank gave it.
        tokens: int64 (R, B), token id of every node.
        sampled: int64 (R, B), token id that was sampled at every node; INVALID_TOKEN if none was sampled.
        probs: float64 (R, B), probability that a draft token and all its ancestors are accepted; 0 if none is stated.
        counts: int64 (R,), number of nodes of each rank; entries of the other arrays beyond this number have no
            meaning.
        logits_at: int64 (3,), numbers (a, b, c): the packed top-k logits of node i of rank r begin at index a + b * r +
            c * i in the messages.
    """

    parents: Any
    tokens: Any
    sampled: Any
    probs: Any
    counts: Any
    logits_at: Any

    @classmethod
    def room(cls, ranks: int, budget: int, logits_at: Sequence[int] = (0, 0, 0)) -> RankTrees:
        """Allocate arrays for the trees of `ranks` ranks, with at most `budget` nodes for each rank.

        `logits_at` is stored as the attribute with this name.
        """
        ints = np.zeros((3, ranks, budget), np.int64)
        counts = np.zeros(ranks, np.int64)
        arrays = (*ints, np.zeros((ranks, budget)), counts, np.array(logits_at, np.int64))
        return cls(*map(compiled_array, arrays))


class Outcome(NamedTuple):
    """The result of verification: the tokens that a decode step generated; equal on every rank except for `own_path`.

    Attributes:
        path: (P,), accepted nodes by their index in the merged tree of all ranks; the first is the newest token of the
            text before the step.
        tokens: (P,), generated token ids: the accepted draft tokens, then the bonus token, sampled at the last accepted
            node.
        accepted: number of accepted draft tokens, P - 1.
        held: (R,), number of nodes of the path for which each rank has the KV, counted from the first node on.
        own_path: nodes of the path that this rank computed, by this rank's own numbers.
        expected: number of draft tokens expected to be accepted along the path, by the probabilities that the draft
            source stated, each given that the token before it was accepted.
        accepted_drafts: number of accepted tokens for which a probability was stated.
    """

    path: list[int]
    tokens: list[int]
    accepted: int
    held: list[int]
    own_path: list[int]
    expected: float
    accepted_drafts: int


class UnionTree:
    """The merged tree of all ranks in a decode step: `merge` makes it, and `walk` finds the accepted tokens in it.

    A node that several ranks computed is one node here, with the sample of the lowest of these ranks. The next step
    overwrites the arrays.

    Args:
        ranks: R, number of ranks.
        budget: B, most nodes of a rank.

    Attributes:
        num_nodes: number of nodes of the merged tree.
        num_draft: number of these nodes that are draft tokens and no window nodes.
        tokens, parents, depths: int64 (num_nodes,), token id of each node, index of its parent, and its distance from
            node 0. Node 0 is the newest token of the text; its parent is -1.
        sampled: int64 (num_nodes,), token id that was sampled at each node; INVALID_TOKEN if none was sampled.
        sources: int64 (num_nodes,), rank * B + node: the rank whose sample counts, and this rank's own number of the
            node.
        starts: int64 (num_nodes,), index in the messages at which the node's packed top-k logits begin.
    """

    def __init__(self, ranks: int, budget: int) -> None:
        self.budget = budget
        size = ranks * budget
        self._ints = np.zeros((9, size), np.int64)
        self._nodes = _Nodes(*map(compiled_array, (*self._ints, np.zeros(size))))
        path, tokens, own = (compiled_zeros(size + 1, "i8") for _ in range(3))
        self._found = _Found(path, tokens, own, compiled_zeros(ranks, "i8"))

    def merge(self, trees: RankTrees, slices: WindowSlices, window_drafts: bool) -> None:
        """Merge the trees of all ranks for a new decode step; the tree of the last step is overwritten.

        Args:
            trees: trees that the ranks computed.
            slices: window columns of each rank.
            window_drafts: whether tokens on level 0 and column 0 of the window count as draft tokens, which may be
                accepted.
        """
        self._counts = trees.counts
        self.num_nodes, self.num_draft = _merge(
            self._nodes, trees, slices.shapes, slices[0].levels, self.budget, window_drafts
        )
        arrays = self._ints[:6, : self.num_nodes]
        self.tokens, self.parents, self.depths, self.sampled, self.sources, self.starts = arrays

    def walk(self, rank: int, most: int) -> Outcome:
        """Find the accepted tokens: from node 0, move on to the child that has the sampled token, until there is none.

        Greedy, coupled and rejection sampling differ only in how a token is sampled at a node (`lp.sampling.sampler`).
        Each sample has the model's own distribution, given the path to its node, so the accepted tokens have it, too.

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
        """The rank whose sample counts at a node of the merged tree: the lowest rank that computed the node.

        Args:
            node: index of the node in the merged tree.
        """
        return int(self.sources[node]) // self.budget

    def stated_probs(self) -> np.ndarray:
        """All accept probabilities that the draft source stated in this step, the largest first: float64, 1-D."""
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
