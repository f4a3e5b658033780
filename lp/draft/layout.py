"""Layout of one rank's decode step: the tokens it computes after `c`, from the lookahead window and the draft tree.

`c` is the newest token of the text. Catch-up tokens are accepted tokens before `c` whose KV this rank lacks, because
another rank computed them.

An example with W = 4 columns, N = 4 and the draft paths (x, y) and (x, z). Each node shows its distance from p, the
position of `c`:

    column     0      1      2      3           draft tree
    level 0    c+0 -> +1  -> +2  -> +3          c -> x+1 -> y+2
               |      |      |      |                  `--> z+2
    level 1    +1     +2     +3     +4
               |      |      |      |
    level 2    +2     +3     +4     +5

Each node attends to the cached prefix, its ancestors and itself, so its parent is all that the attention mask needs.
Level 0 and column 0 are paths after `c` like the paths of the draft tree, so their tokens may be accepted too. Each
column's next token is sampled at its node on the last level. A rank that computes some of the columns also computes
level 0 up to the last of these columns.

S: number of nodes; N: n-gram size, so there are N - 1 levels; T: number of step tokens, which are catch-up tokens and
nodes.
Node order: `c` and level 0, then levels 1 to N-2, then the nodes that only the draft tree has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lp.compiled import compiled_array, compiled_ints, jit
from lp.draft.tree import DraftTree
from lp.draft.window import LookaheadWindow, WindowSlice


def ancestors(parents: Sequence[int] | np.ndarray) -> np.ndarray:
    """Attention mask of a tree, bool (S, S): whether node i attends to node j, which is node i itself or an ancestor.

    Args:
        parents: int64 (S,), index of each node's parent, always smaller than the node's own index; -1 for a root.
    """
    visible = np.zeros((len(parents), len(parents)), dtype=np.bool_)
    _fill_visible(compiled_ints(parents), compiled_array(visible))
    return visible


@jit
def _fill_visible(parents, visible):  # type: ignore[no-untyped-def]
    for node in range(len(parents)):
        if parents[node] >= 0:
            for above in range(parents[node] + 1):
                visible[node, above] = visible[parents[node], above]
        visible[node, node] = True


class StepLayout:
    """Lays out one rank's decode step for the forward pass: catch-up tokens, `c`, window columns and draft tree.

    `c` is the newest token of the text. A node is `c` or a token that may follow it, from the lookahead window or the
    draft tree. Level 0 and column 0 are the two paths of the window that begin with `c`. Catch-up tokens are accepted
    tokens before `c` whose KV this rank lacks.

    Args:
        window: the lookahead window, equal on every rank.
        columns: the columns of the window that this rank computes.
        draft: this rank's draft tree; nodes that repeat level 0 or column 0 of the window are not computed twice.
        token: token id of `c`.
        position: p, the position of `c` in the text, from 0.
        limit: first position that may not be used; draft nodes at this position or after it are dropped.
        catch_up: token ids of the catch-up tokens; the last one is right before `c` in the text.

    Attributes:
        num_nodes: S, number of nodes on this rank.
        num_window: number of nodes that are `c` or belong to the window; they come first, and draft nodes follow.
        num_tokens: T, number of step tokens, which are catch-up tokens and nodes.
        tokens, positions, parents: int64 (S,), token id, position in the text, and index of the parent of each node;
            the parent of `c` is -1.
        accept_probs: float64 (S,), probability that the node and all its ancestors are accepted; 0 where the draft
            source states none.
        reachable: bool (S,), whether the node's token can be accepted: it is in level 0, column 0 or the draft tree.
        drafted_behind: int64 (S,), index of the node after which this node's token is drafted; -1 for a node that can't
            be accepted, and for a node that repeats another one (equal token after the same node).
        sampled_nodes: int64 (n,), indices of the nodes at which a next token is sampled, ascending.
        sampled_tokens: (n,), indices of these nodes among the T step tokens.
        sampled_positions: (n,), positions of these nodes in the text.
        step_tokens, step_positions, step_parents: int64 (T,), input of the forward pass: the catch-up tokens, each with
            the token before it as parent, then the nodes.
        nodes: LayoutNodes, the per-node arrays for functions compiled by numba; they may be longer than S.

    Raises:
        ValueError: the draft tree is malformed, see `DraftTree.check`.
    """

    def __init__(
        self,
        window: LookaheadWindow,
        columns: WindowSlice,
        draft: DraftTree,
        token: int,
        position: int,
        limit: int,
        catch_up: Sequence[int] = (),
    ) -> None:
        self.catch_up = catch_up
        self.columns = columns
        guesses = window.levels[0][1 : columns.level_0_nodes]
        for level in window.levels[1:]:
            guesses = guesses + level[columns.first : columns.end]
        self.num_window = 1 + len(guesses)
        size = self.num_window + len(draft)
        probs = draft.accept_probs if len(draft.accept_probs) else np.zeros(len(draft))
        if not len(draft.parents) == len(probs) == len(draft):  # compiled functions would not notice
            draft.check()
        ints = np.empty((9, size), np.int64)
        flags = np.empty((2, size), np.bool_)
        accept_probs = np.empty(size)
        self.nodes = LayoutNodes(*map(compiled_array, (*ints, *flags, accept_probs)))
        count, num_sampled = _lay_out(
            self.nodes,
            columns.nodes,
            compiled_ints([token, *guesses]),
            compiled_ints(draft.tokens),
            compiled_ints(draft.parents),
            compiled_array(np.array(probs, np.float64)),
            draft.merge,
            position,
            limit,
        )
        if count < 0:
            draft.check()
        self.num_nodes: int = count
        self.tokens, self.positions, self.parents, self.drafted_behind = ints[:4, :count]
        self.reachable = flags[0, :count]
        self.accept_probs = accept_probs[:count]
        self.sampled_nodes = ints[4, :num_sampled]
        self.sampled_positions: list[int] = self.positions[self.sampled_nodes].tolist()
        self.step_tokens = self.tokens
        self.step_positions = self.positions
        self.step_parents = self.parents
        missing = len(catch_up)
        self.num_tokens = missing + self.num_nodes
        self.sampled_tokens: list[int] = (self.sampled_nodes + missing).tolist()
        if missing:
            self.step_tokens = np.concatenate([catch_up, self.tokens])
            self.step_positions = np.concatenate([np.arange(position - missing, position), self.positions])
            self.step_parents = np.concatenate([np.arange(-1, missing - 1), self.parents + missing])

    def drafts(self) -> dict[int, list[int]]:
        """Group the step's draft tokens by the node after which they are drafted.

        Returns:
            Distinct token ids by the index of that node, in the order of the layout; a node without draft tokens after
            it has no entry.
        """
        drafts: dict[int, list[int]] = {}
        for node, token in zip(self.drafted_behind.tolist(), self.tokens.tolist(), strict=True):
            if node >= 0:
                drafts.setdefault(node, []).append(token)
        return drafts

    def branch_tokens(self, node: int) -> list[int] | None:
        """List the tokens on the path from the text's newest token `c` (excluded) to a node (included).

        Logits processors at the node see the text followed by these tokens.

        Args:
            node: index of the node.

        Returns:
            Token ids in the order of the text; an empty list for `c`. None for a window node whose token can't be
            accepted; logits processors skip such nodes.
        """
        if not self.reachable[node]:
            return None
        branch: list[int] = []
        while node:
            branch.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return branch[::-1]


class LayoutNodes(NamedTuple):
    """Arrays with one entry for each node of a `StepLayout`, which functions compiled by numba read and fill.

    They have room for at least as many nodes as the layout has.
    """

    tokens: Any  # int64 (S,), like all that have no other type
    positions: Any
    parents: Any
    drafted_behind: Any
    sampled_nodes: Any
    first_child: Any  # -1 for none; children that have a token of their own
    next_sibling: Any
    stands_for: Any  # by node of the window, the node that stands for it
    node_of: Any  # by node of the draft tree, its node here; -1 where it is past the limit
    reachable: Any  # bool (S,)
    sampled: Any  # bool (S,): whether the node's token is sampled
    accept_probs: Any  # float64 (S,)


@jit
def _lay_out(nodes, window, own_tokens, tokens, parents, probs, merge, position, limit):  # type: ignore[no-untyped-def]
    """Fill in `c` and the window, then the draft tree.

    Returns:
        The number of nodes, -1 where the draft tree is malformed; and the number of nodes that sample a token.
    """
    count = len(own_tokens)
    for node in range(count):
        nodes.tokens[node] = own_tokens[node]
        nodes.positions[node] = position + window.distances[node]
        nodes.parents[node] = window.parents[node]
        nodes.accept_probs[node] = 0.0
        nodes.sampled[node] = window.sampled[node]
        nodes.reachable[node] = window.on_walk[node]
        nodes.drafted_behind[node] = -1
        nodes.first_child[node] = -1
        nodes.stands_for[node] = node
        if merge and node > 0 and window.on_walk[node]:
            # Where level 0 and column 0 begin with the same tokens, the node of level 0 stands for both.
            parent = nodes.stands_for[window.parents[node]]
            found = child_with(nodes, parent, own_tokens[node])
            if found >= 0:
                nodes.stands_for[node] = found
            else:
                nodes.drafted_behind[node] = parent
                add_child(nodes, parent, node)
    for index in range(len(tokens)):
        if parents[index] >= index:
            return -1, 0
        parent = nodes.node_of[parents[index]] if parents[index] >= 0 else 0
        if parent < 0 or nodes.positions[parent] + 1 >= limit:
            nodes.node_of[index] = -1
            continue
        node = child_with(nodes, parent, tokens[index])
        if node < 0 or not merge:
            listed = node >= 0
            node = count
            count += 1
            nodes.tokens[node] = tokens[index]
            nodes.positions[node] = nodes.positions[parent] + 1
            nodes.parents[node] = parent
            nodes.sampled[node] = True
            nodes.reachable[node] = True
            nodes.drafted_behind[node] = -1
            nodes.first_child[node] = -1
            if not listed:
                nodes.drafted_behind[node] = parent
                add_child(nodes, parent, node)
        nodes.accept_probs[node] = probs[index]
        nodes.node_of[index] = node
    num_sampled = 0
    for node in range(count):
        if nodes.sampled[node]:
            nodes.sampled_nodes[num_sampled] = node
            num_sampled += 1
    return count, num_sampled


@jit
def child_with(nodes, parent, token):  # type: ignore[no-untyped-def]
    """Find the child of a node that has a given token (a function compiled by numba).

    Args:
        nodes: LayoutNodes, or the same arrays for the merged draft tree of all ranks.
        parent: index of the node whose children are searched.
        token: token id to find.

    Returns:
        Index of the child; -1 if no child that `add_child` has linked has this token.
    """
    node = nodes.first_child[parent]
    while node >= 0 and nodes.tokens[node] != token:
        node = nodes.next_sibling[node]
    return node


@jit
def add_child(nodes, parent, node):  # type: ignore[no-untyped-def]
    """Link a node to its parent, so that `child_with` finds the node (a function compiled by numba).

    Args:
        nodes: LayoutNodes, or the same arrays for the merged draft tree of all ranks.
        parent: index of the parent.
        node: index of the new child, which becomes the first in the parent's list of children.
    """
    nodes.next_sibling[node] = nodes.first_child[parent]
    nodes.first_child[parent] = node
