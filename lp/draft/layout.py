"""What one rank computes in a step: its part of the tree of draft tokens and window guesses behind `c`.

With W = 4, N = 4 and the draft paths (x, y) and (x, z), each node with its distance from p, the position of `c`:

    column     0      1      2      3           draft tree
    level 0    c+0 -> +1  -> +2  -> +3          c -> x+1 -> y+2
               |      |      |      |                  `--> z+2
    level 1    +1     +2     +3     +4
               |      |      |      |
    level 2    +2     +3     +4     +5

Each node sees the cached prefix, its ancestors and itself, so the parents are all that attention needs. Level 0 and
column 0 are paths behind `c` like those of the draft tree: a walk may accept their tokens too. The nodes of the last
level sample the columns' next tokens. A rank that has some of the columns has level 0 up to the last of them.

S: nodes; N: n-gram size, so N - 1 levels; T: step tokens, the catch-up tokens and the nodes.
Node order: `c` and level 0, levels 1..N-2, then the draft tree's own nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from lp.compiled import compiled_array, compiled_ints, jit
from lp.draft.tree import DraftTree
from lp.draft.window import LookaheadWindow, WindowSlice


def ancestors(parents: Sequence[int] | np.ndarray) -> np.ndarray:
    """Visibility (S, S) of trees given in topological order: [i, j] is whether node i sees node j.

    Args:
        parents: parent of every node, before it; -1 for a root.
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


class LayoutNodes(NamedTuple):
    """The nodes of a layout, as compiled functions take them: `c` and the window first, then the draft tree's own.

    Attributes:
        tokens, positions, parents: int64 (S,); the parent of `c` is -1.
        accept_probs: float64 (S,); 0 where the draft source states none.
        sampled: bool (S,), whether the node's token is sampled.
        reachable: bool (S,), whether a walk may reach the node.
        drafted_behind: int64 (S,), the node that a walk comes from; -1 where no walk comes, or where another node with
            the same token behind the same node stands for this one.
    """

    tokens: Any
    positions: Any
    parents: Any
    accept_probs: Any
    sampled: Any
    reachable: Any
    drafted_behind: Any

    @classmethod
    def room(cls, size: int) -> LayoutNodes:
        """Room for so many nodes."""
        tokens, positions, parents, drafted_behind = map(compiled_array, np.empty((4, size), np.int64))
        sampled, reachable = map(compiled_array, np.empty((2, size), np.bool_))
        return cls(tokens, positions, parents, compiled_array(np.empty(size)), sampled, reachable, drafted_behind)

    def first(self, count: int) -> LayoutNodes:
        """The first nodes."""
        return LayoutNodes(*(field[:count] for field in self))


class _WindowNodes(NamedTuple):
    """The nodes of `c` and of a slice of the window.

    Attributes:
        parents, distances: int64 (nodes,); distance from p.
        on_walk: bool (nodes,), those that a walk may reach: `c`, level 0 and column 0.
        sampled: bool (nodes,), those whose token is sampled: those on a walk, and the last level.
    """

    parents: Any
    distances: Any
    on_walk: Any
    sampled: Any


@lru_cache(maxsize=256)
def _window_nodes(columns: WindowSlice) -> _WindowNodes:
    entries = [(0, j) for j in range(columns.level_0_nodes)]
    entries += [(k, j) for k in range(1, columns.levels) for j in range(columns.first, columns.end)]
    index = {entry: node for node, entry in enumerate(entries)}
    parents = [index[k - 1, j] if k else j - 1 for k, j in entries]
    on_walk = np.array([k == 0 or j == 0 for k, j in entries])
    sampled = on_walk.copy()
    sampled[columns.first_of_last_level :] = True
    return _WindowNodes(
        parents=compiled_ints(parents),
        distances=compiled_ints([k + j for k, j in entries]),
        on_walk=compiled_array(on_walk),
        sampled=compiled_array(sampled),
    )


class StepLayout:
    """Tokens, positions and parents of the nodes that a rank computes in one step.

    Args:
        window: its levels.
        columns: the rank's slice of it.
        draft: the rank's draft tree; nodes that repeat level 0 or column 0 share their nodes.
        token: `c`.
        position: p, of `c`.
        limit: positions below it may be used; draft nodes past it are dropped.
        catch_up: accepted tokens whose KV the rank lacks, which end right before `c`.

    Attributes:
        nodes: all of them.
        num_window: nodes of `c` and the window; the draft tree's own follow.
        num_tokens: T.

    Raises:
        ValueError: as `DraftTree.check`.
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
        self._window = _window_nodes(columns)
        guesses = window.levels[0][1 : columns.level_0_nodes]
        for level in window.levels[1:]:
            guesses = guesses + level[columns.first : columns.end]
        self.num_window = 1 + len(guesses)
        size = self.num_window + len(draft)
        probs = draft.accept_probs if len(draft.accept_probs) else np.zeros(len(draft))
        if not len(draft.parents) == len(probs) == len(draft):  # compiled functions would not notice
            draft.check()
        nodes = LayoutNodes.room(size)
        step = StepTokens(*np.empty((3, len(catch_up) + size), np.int64))
        count = _lay_out(
            nodes,
            StepTokens(*map(compiled_array, step)),
            _Children.room(size),
            self._window,
            compiled_ints([token, *guesses]),
            compiled_ints(catch_up),
            compiled_ints(draft.tokens),
            compiled_ints(draft.parents),
            compiled_array(np.array(probs, np.float64)),
            draft.merge,
            position,
            limit,
        )
        if count < 0:
            draft.check()
        self.nodes = nodes if count == size else nodes.first(count)
        self.num_tokens = len(catch_up) + int(count)
        self._step = step

    def __len__(self) -> int:
        return len(self.nodes.tokens)

    @cached_property
    def tokens(self) -> list[int]:
        """Of every node."""
        tokens: list[int] = self.nodes.tokens.tolist()
        return tokens

    @cached_property
    def positions(self) -> list[int]:
        """Of every node."""
        positions: list[int] = self.nodes.positions.tolist()
        return positions

    @cached_property
    def parents(self) -> list[int]:
        """Of every node; that of `c` is -1."""
        parents: list[int] = self.nodes.parents.tolist()
        return parents

    @cached_property
    def accept_probs(self) -> list[float]:
        """Of every node; 0 where the draft source states none."""
        probs: list[float] = self.nodes.accept_probs.tolist()
        return probs

    @cached_property
    def sampled_nodes(self) -> list[int]:
        """Nodes whose token is sampled, ascending."""
        if len(self) == 1:
            return [0]
        return np.flatnonzero(self.nodes.sampled).tolist()

    @property
    def sampled_tokens(self) -> list[int]:
        """Where these nodes are among the tokens of the step."""
        missing = len(self.catch_up)
        return [missing + node for node in self.sampled_nodes] if missing else self.sampled_nodes

    @property
    def sampled_positions(self) -> list[int]:
        """Of these nodes."""
        if self.samples_all:
            return self.positions
        positions: list[int] = np.asarray(self.nodes.positions)[np.asarray(self.nodes.sampled)].tolist()
        return positions

    @property
    def samples_all(self) -> bool:
        """Every node's token is sampled."""
        return len(self.sampled_nodes) == len(self)

    def drafts(self) -> dict[int, list[int]]:
        """By node, the different tokens that may follow it in a walk, in the order they were laid out."""
        drafts: dict[int, list[int]] = {}
        for node, token in zip(self.nodes.drafted_behind.tolist(), self.tokens, strict=True):
            if node >= 0:
                drafts.setdefault(node, []).append(token)
        return drafts

    def branch_tokens(self, node: int) -> list[int] | None:
        """The tokens behind `c` up to the node, which logits processors see as the end of its text.

        None for a node that no walk reaches: it only guesses, and logits processors leave it out.
        """
        if not self.reachable(node):
            return None
        branch = []
        while node:
            branch.append(self.tokens[node])
            node = self.parents[node]
        return branch[::-1]

    def reachable(self, node: int) -> bool:
        """Whether a walk may reach the node: it is of level 0, of column 0 or of the draft tree."""
        return bool(self.nodes.reachable[node])

    def step_tokens(self, num_tokens: int) -> StepTokens:
        """What the forward pass computes: catch-up tokens, then the nodes.

        Args:
            num_tokens: where larger than T, tokens are added that nothing sees and nothing is sampled at.
        """
        tokens, positions, parents = (field[: self.num_tokens] for field in self._step)
        if (padding := num_tokens - self.num_tokens) > 0:
            values = (int(self.nodes.tokens[0]), int(self.nodes.positions[0]), -1)
            padded = zip((tokens, positions, parents), values, strict=True)
            return StepTokens(*(np.pad(field, (0, padding), constant_values=value) for field, value in padded))
        return StepTokens(tokens, positions, parents)


class StepTokens(NamedTuple):
    """The tokens of a forward pass.

    Attributes:
        tokens, positions: int64 (T,).
        parents: int64 (T,): a token sees its parent, what that one sees, and itself; -1 where it sees itself alone.
    """

    tokens: np.ndarray
    positions: np.ndarray
    parents: np.ndarray

    def visible(self) -> np.ndarray:
        """Bool (T, T), which tokens of the step each one sees."""
        return ancestors(self.parents)


class _Children(NamedTuple):
    """Room for lists of children, by node."""

    stands_for: Any  # int64 (S,): the node that stands for a node of the window
    first: Any  # int64 (S,): -1 for none
    next: Any  # int64 (S,)
    node_of: Any  # int64 (S,): of every node of the draft tree its node here; -1 where it is past the limit

    @classmethod
    def room(cls, size: int) -> _Children:
        """For so many nodes."""
        return cls(*map(compiled_array, np.empty((4, size), np.int64)))


@jit
def _lay_out(nodes, step, children, window, own_tokens, catch_up, tokens, parents, probs, merge, position, limit):  # type: ignore[no-untyped-def]
    """Fill in nodes and the tokens of the step; returns how many nodes there are, -1 for no tree."""
    count = _fill_nodes(nodes, children, window, own_tokens, tokens, parents, probs, merge, position, limit)
    missing = len(catch_up)
    for at in range(missing):
        step.tokens[at] = catch_up[at]
        step.positions[at] = position - missing + at
        step.parents[at] = at - 1
    for node in range(count):
        at = missing + node
        step.tokens[at] = nodes.tokens[node]
        step.positions[at] = nodes.positions[node]
        step.parents[at] = nodes.parents[node] + missing  # that of `c` is the last one that it catches up with
    return count


@jit
def _fill_nodes(nodes, children, window, own_tokens, tokens, parents, probs, merge, position, limit):  # type: ignore[no-untyped-def]
    """Fill in `c` and the window, then the draft tree."""
    count = len(own_tokens)
    for node in range(count):
        nodes.tokens[node] = own_tokens[node]
        nodes.positions[node] = position + window.distances[node]
        nodes.parents[node] = window.parents[node]
        nodes.accept_probs[node] = 0.0
        nodes.sampled[node] = window.sampled[node]
        nodes.reachable[node] = window.on_walk[node]
        nodes.drafted_behind[node] = -1
        children.first[node] = -1
        children.stands_for[node] = node
        if merge and node > 0 and window.on_walk[node]:
            # Where level 0 and column 0 begin with the same tokens, the node of level 0 stands for both.
            parent = children.stands_for[window.parents[node]]
            found = _child(nodes, children, parent, own_tokens[node])
            if found >= 0:
                children.stands_for[node] = found
            else:
                _add_child(nodes, children, parent, node)
    for index in range(len(tokens)):
        if parents[index] >= index:
            return -1
        parent = children.node_of[parents[index]] if parents[index] >= 0 else 0
        if parent < 0 or nodes.positions[parent] + 1 >= limit:
            children.node_of[index] = -1
            continue
        node = _child(nodes, children, parent, tokens[index])
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
            children.first[node] = -1
            if not listed:
                _add_child(nodes, children, parent, node)
        nodes.accept_probs[node] = probs[index]
        children.node_of[index] = node
    return count


@jit
def _child(nodes, children, parent, token):  # type: ignore[no-untyped-def]
    """The node that stands for this token behind the parent, or -1."""
    node = children.first[parent]
    while node >= 0 and nodes.tokens[node] != token:
        node = children.next[node]
    return node


@jit
def _add_child(nodes, children, parent, node):  # type: ignore[no-untyped-def]
    nodes.drafted_behind[node] = parent
    children.next[node] = children.first[parent]
    children.first[parent] = node
