"""The union of all ranks' trees, and the walk that decides which draft tokens the model itself sampled (Algorithm 3).

Several ranks may have computed the same node, a path of tokens behind `c`. Of these the lowest rank speaks: its sample
counts. Who speaks depends on the trees alone, never on what was sampled, so every walked token has the distribution
that the model gives it, however its sampler draws: the longest of the ranks' own walks would not have it.

R: ranks; B: nodes of a rank, at most; P: nodes of the accepted path, `c` included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lp.compiled import compiled_array, compiled_ints, compiled_zeros, jit
from lp.draft.window import WindowSlice
from lp.sampling.sampler import INVALID_TOKEN


class RankTrees(NamedTuple):
    """The trees of all ranks, node by node in each rank's own order, as the messages have them.

    Attributes:
        parents, tokens, sampled: int64 (R, B); a rank's own node numbers; INVALID_TOKEN where nothing was sampled.
        probs: float64 (R, B): of a draft token and all before it to be accepted; 0 where none is stated.
        counts: (R,), nodes of every rank.
    """

    parents: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray
    probs: np.ndarray
    counts: np.ndarray


class _Nodes(NamedTuple):
    """Room for the nodes of a union, `c` first, parents before children."""

    tokens: Any  # int64 (R * B,), like all that have no other type
    parents: Any
    depths: Any
    sampled: Any
    probs: Any  # float64 (R * B,)
    first_child: Any  # -1 for none; children that a walk may take
    next_sibling: Any
    sources: Any  # rank * B + node of the rank that speaks
    node_of: Any  # by rank * B + node: its node here


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step decided, alike on every rank.

    Attributes:
        path: nodes of the union from `c` to the last accepted one, (P,).
        tokens: the accepted tokens and the bonus token, (P,).
        held: by rank, how many nodes of the path it computed; they are the first ones.
        expected: draft tokens that the stated probabilities expected along the path, each given the one before it.
        accepted_drafts: accepted tokens that had a stated probability.
    """

    path: list[int]
    tokens: list[int]
    held: list[int]
    expected: float
    accepted_drafts: int

    @property
    def accepted(self) -> int:
        """Accepted tokens, without the bonus token."""
        return len(self.tokens) - 1


class UnionTree:
    """The union of one step; its arrays are used again in the next.

    Args:
        ranks: R.
        budget: B.

    Attributes:
        num_nodes: of the union.
        num_draft: of these, nodes that are no rank's window.
    """

    def __init__(self, ranks: int, budget: int) -> None:
        self.ranks = ranks
        self.budget = budget
        self.num_nodes = 0
        self.num_draft = 0
        size = ranks * budget
        self._nodes = _Nodes(*(compiled_zeros(size, "f8" if name == "probs" else "i8") for name in _Nodes._fields))
        self._path = compiled_zeros(size + 1, "i8")
        self._local = compiled_zeros(size + 1, "i8")
        self._held = compiled_zeros(ranks, "i8")

    def merge(self, trees: RankTrees, slices: Sequence[WindowSlice], window_drafts: bool) -> None:
        """Take in the trees of all ranks.

        Args:
            trees: of the step.
            slices: by rank, its columns of the window.
            window_drafts: level 0 and column 0 are drafts.
        """
        self._counts = compiled_ints(trees.counts)
        self.num_nodes, self.num_draft = _merge(
            self._nodes,
            compiled_array(trees.parents.ravel()),
            compiled_array(trees.tokens.ravel()),
            compiled_array(trees.sampled.ravel()),
            compiled_array(trees.probs.ravel()),
            self._counts,
            compiled_ints([(each.first, each.num_columns, each.level_0_nodes) for each in slices]),
            slices[0].levels,
            self.budget,
            window_drafts,
        )

    def walk(self, rank: int, most: int) -> tuple[Outcome, list[int]]:
        """Walk from `c`: follow the child with the token that a node sampled, while there is one.

        Greedy, coupled and rejection sampling differ only in how a node samples its token (`lp.sampling.sampler`): each
        sample has the model's own distribution given the node's path, so the walked tokens have it too.

        Args:
            rank: whose own nodes are wanted.
            most: accept at most so many tokens.

        Returns:
            The outcome, and the rank's own nodes of its path, as far as it has them.
        """
        length, expected, accepted_drafts = _walk(self._nodes, self._path, most)
        _find_held(self._nodes, self._counts, self.budget, self._path, length, rank, self._held, self._local)
        held = np.asarray(self._held).tolist()
        path = np.asarray(self._path)[:length]
        tokens = np.asarray(self._nodes.sampled)[path].tolist()
        own = np.asarray(self._local)[: held[rank]].tolist()
        return Outcome(path.tolist(), tokens, held, expected, accepted_drafts), own

    def speaker(self, node: int) -> int:
        """The rank that speaks for a node."""
        return int(self._nodes.sources[node]) // self.budget

    @property
    def tokens(self) -> np.ndarray:
        """Of every node, (num_nodes,); the next ones likewise."""
        return np.asarray(self._nodes.tokens)[: self.num_nodes]

    @property
    def parents(self) -> np.ndarray:
        """The parent; -1 for `c`."""
        return np.asarray(self._nodes.parents)[: self.num_nodes]

    @property
    def depths(self) -> np.ndarray:
        """The distance from `c`."""
        return np.asarray(self._nodes.depths)[: self.num_nodes]

    @property
    def sampled(self) -> np.ndarray:
        """What the rank that speaks sampled; INVALID_TOKEN where it sampled nothing."""
        return np.asarray(self._nodes.sampled)[: self.num_nodes]

    @property
    def sources(self) -> np.ndarray:
        """Rank * B + node of the rank that speaks."""
        return np.asarray(self._nodes.sources)[: self.num_nodes]

    @property
    def accept_probs(self) -> np.ndarray:
        """Of the draft tokens that have one, the most likely first."""
        probs = np.asarray(self._nodes.probs)[: self.num_nodes]
        return np.sort(probs[probs > 0])[::-1]


@jit
def _merge(nodes, parents, tokens, sampled, probs, counts, slices, levels, budget, window_drafts):  # type: ignore[no-untyped-def]
    """Returns the number of nodes, and of those among them that are no rank's window."""
    num_nodes = num_draft = 0
    for rank in range(len(counts)):
        first, columns, level_0 = slices[rank, 0], slices[rank, 1], slices[rank, 2]
        window = level_0 + columns * (levels - 1)
        for index in range(counts[rank]):
            at = rank * budget + index
            parent = node = -1
            on_walk = True
            if index > 0:
                parent = nodes.node_of[rank * budget + parents[at]]
                if index < window:
                    below = index - level_0  # nodes of lower levels are column by column
                    on_walk = window_drafts and (below < 0 or first + below % max(columns, 1) == 0)
                if on_walk:
                    node = _child(nodes, parent, tokens[at])
            elif num_nodes > 0:
                node = 0
            if node < 0:
                node = num_nodes
                num_nodes += 1
                num_draft += 1 if index >= window else 0
                nodes.tokens[node] = tokens[at]
                nodes.parents[node] = parent
                nodes.depths[node] = nodes.depths[parent] + 1 if index > 0 else 0
                nodes.sampled[node] = sampled[at]
                nodes.probs[node] = 0.0
                nodes.sources[node] = at
                nodes.first_child[node] = -1
                if index > 0 and on_walk:
                    nodes.next_sibling[node] = nodes.first_child[parent]
                    nodes.first_child[parent] = node
            if nodes.probs[node] == 0.0:
                nodes.probs[node] = probs[at]
            nodes.node_of[at] = node
    return num_nodes, num_draft


@jit
def _child(nodes, parent, token):  # type: ignore[no-untyped-def]
    """The child of a node with this token, or -1."""
    node = nodes.first_child[parent]
    while node >= 0 and nodes.tokens[node] != token:
        node = nodes.next_sibling[node]
    return node


@jit
def _walk(nodes, path, most):  # type: ignore[no-untyped-def]
    """Fill the path; returns its length, and `expected` and `accepted_drafts` as in Outcome."""
    node = 0
    length = 1
    path[0] = 0
    expected = 0.0
    accepted_drafts = 0
    above = 1.0  # probability of the node; 0 once the path has left the draft tokens that state one
    while True:
        if above > 0:
            child = nodes.first_child[node]
            while child >= 0:
                expected += nodes.probs[child] / above
                child = nodes.next_sibling[child]
        child = _child(nodes, node, nodes.sampled[node])
        if length > most or child < 0 or nodes.sampled[child] == INVALID_TOKEN:
            return length, expected, accepted_drafts
        above = nodes.probs[child] if above > 0 else 0.0
        if above > 0:
            accepted_drafts += 1
        node = child
        path[length] = node
        length += 1


@jit
def _find_held(nodes, counts, budget, path, length, own_rank, held, local):  # type: ignore[no-untyped-def]
    """By rank, how many nodes of the path it has; of one rank, which of its nodes these are."""
    for rank in range(len(counts)):
        held[rank] = 0
        for index in range(counts[rank]):
            node = nodes.node_of[rank * budget + index]
            depth = nodes.depths[node]
            if depth < length and path[depth] == node and depth == held[rank]:
                held[rank] = depth + 1
                if rank == own_rank:
                    local[depth] = index
