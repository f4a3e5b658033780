"""The global layout of one step: a tree of nodes behind the last generated token `c`.

S: nodes; W: whole columns that fit the context; N: n-gram size; p: position of `c`.
Node order: `c` and row 0 (W nodes, or `c` alone), rows 1..N-2 (W each), then the draft tree's own nodes.
Each node sees the cached prefix, its ancestors and itself, so the parents say everything attention needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lp.compiled import given, ints, jit
from lp.config import LookaheadConfig
from lp.draft.tree import DraftTree
from lp.draft.window import LookaheadWindow


def ancestors(parents: Sequence[int], known: np.ndarray | None = None) -> np.ndarray:
    """Visibility (S, S) of a tree given in topological order: [i, j] says node i sees node j.

    Args:
        parents: parent of every node, -1 for the root.
        known: the same for the first nodes, if computed before.
    """
    visible = np.zeros((len(parents), len(parents)), dtype=np.bool_)
    done = 0 if known is None else len(known)
    if known is not None:
        visible[:done, :done] = known
    _inherit(given(visible), ints(parents), done)
    return visible


@jit
def _inherit(visible, parents, done):  # type: ignore[no-untyped-def]
    for node in range(done, len(parents)):
        if parents[node] >= 0:
            for above in range(node):
                visible[node, above] = visible[parents[node], above]
        visible[node, node] = True


@lru_cache(maxsize=256)
def _window_tree(columns: int, rows: int) -> tuple[tuple[int, ...], tuple[int, ...], np.ndarray]:
    """Parents, offsets from p, and visibility of the window's nodes."""
    level_0 = max(columns, 1)
    nodes = [(0, j) for j in range(level_0)] + [(k, j) for k in range(1, rows) for j in range(columns)]
    parents = [j - 1 if k == 0 else j if k == 1 else level_0 + (k - 2) * columns + j for k, j in nodes]
    return tuple(parents), tuple(k + j for k, j in nodes), ancestors(parents)


class StepLayout:
    """Tokens, positions and parents of the nodes of one step, equal on every rank.

    Args:
        window: its rows; `window_size` may be 0.
        draft: the proposed tree; nodes that repeat row 0 or column 0 take their nodes.
        token: `c`.
        position: p, of `c`.
        limit: positions below it may be used; nodes past it are dropped, whole columns at a time.

    Attributes:
        tokens, positions, parents: lists of S ints; parent -1 is `c`'s own.
        columns: columns kept.
        num_window: nodes of `c` and the window; the draft tree's own follow.
        sampled_nodes: nodes whose read-off is needed, ascending.
    """

    def __init__(self, window: LookaheadWindow, draft: DraftTree, token: int, position: int, limit: int) -> None:
        rows = window.ngram_size - 1
        self.levels = rows
        self.columns = max(min(window.window_size, limit - position - rows + 1), 0)
        parents, offsets, self._window_visible = _window_tree(self.columns, rows)
        self.tokens = [token, *window.levels[0][1 : self.columns]]
        for row in window.levels[1:]:
            self.tokens += row[: self.columns]
        self.parents = list(parents)
        self.positions = [position + offset for offset in offsets]
        self.num_window = len(self.tokens)
        self._child = self._window_children() if draft.merge else {}
        self._graft(draft, limit)
        self._drafts: dict[int, list[int]] = {}  # made when first asked for
        self.sampled_nodes = self._sampled()

    def __len__(self) -> int:
        return len(self.tokens)

    def window_node(self, row: int, column: int) -> int:
        """The node of a window entry."""
        return column if row == 0 else max(self.columns, 1) + (row - 1) * self.columns + column

    def last_level(self) -> range:
        """Nodes whose read-offs are the columns' new tokens: (columns,)."""
        first = self.window_node(self.levels - 1, 0)
        return range(first, first + self.columns)

    def column_0(self) -> range:
        """Nodes of column 0 below row 0."""
        first = self.window_node(1, 0)
        return range(first, first + (self.levels - 1) * self.columns, max(self.columns, 1))

    def children(self, node: int, token: int) -> list[int]:
        """The nodes right behind `node` that carry `token` and are read: row 0's, column 0's or a candidate's."""
        return self._child.get((node, token), [])

    def drafts(self, node: int) -> list[int]:
        """The different tokens that may follow the node in a walk, in the order they were laid out."""
        if not self._drafts:
            for parent, follower in self._child:
                self._drafts.setdefault(parent, []).append(follower)
        return self._drafts.get(node, [])

    def path(self, node: int) -> list[int]:
        """From `c` to the node, both included."""
        path = [node]
        while (node := self.parents[node]) >= 0:
            path.append(node)
        return path[::-1]

    def branch(self, node: int, bare: bool = False) -> list[int] | None:
        """Tokens after `c` up to the node (none if `bare`); None for a node that only guesses: no walk reaches it."""
        if node >= self.num_window or node < max(self.columns, 1) or (node - self.columns) % self.columns == 0:
            return [] if bare else [self.tokens[above] for above in self.path(node)[1:]]
        return None

    def visible(self) -> np.ndarray:
        """Visibility (S, S), bool."""
        return ancestors(self.parents, self._window_visible)

    def _window_children(self) -> dict[tuple[int, int], list[int]]:
        """Row 0 and column 0 are draft at no extra row; the same token may stand in both."""
        child: dict[tuple[int, int], list[int]] = {}
        for node in (*range(1, self.columns), *self.column_0()):
            child.setdefault((self.parents[node], self.tokens[node]), []).append(node)
        return child

    def _graft(self, tree: DraftTree, limit: int) -> None:
        tokens, parents, positions, children = self.tokens, self.parents, self.positions, self._child
        nodes: list[int] = []  # of every tree node; -1 where it was dropped
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            above = nodes[parent] if parent >= 0 else 0
            position = positions[above] + 1
            if above < 0 or position >= limit:
                nodes.append(-1)
                continue
            there = children.get((above, token))
            if there is None or not tree.merge:
                node = len(tokens)
                if there is None:
                    children[above, token] = [node]
                else:
                    there.append(node)
                nodes.append(node)
                tokens.append(token)
                parents.append(above)
                positions.append(position)
            else:
                nodes.append(there[0])

    def _sampled(self) -> list[int]:
        if self.levels == 1 or not self.columns:
            return list(range(len(self.tokens)))
        guesses = [*range(self.columns), *self.column_0()[:-1]]  # column 0's last node is of the last row
        return [*guesses, *self.last_level(), *range(self.num_window, len(self.tokens))]


def largest_layout(config: LookaheadConfig) -> StepLayout:
    """The largest step there can be: all columns, and all candidate rows in paths that share nothing."""
    budget, depth = config.draft_budget, config.depth
    tree = DraftTree(budget)
    for first in range(0, budget, depth):
        tree.add_path(-1 - row for row in range(first, min(first + depth, budget)))
    return StepLayout(LookaheadWindow(config.window_size, config.ngram_size, [0]), tree, 0, 0, sys.maxsize)
