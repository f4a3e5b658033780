"""The tree of one step: the window and the draft tokens behind `c`, the newest token of the text.

With W = 4, N = 4 and the draft paths (x, y) and (x, z), each node with its distance from p, the position of `c`:

    column     0      1      2      3           draft tree
    level 0    c+0 -> +1  -> +2  -> +3          c -> x+1 -> y+2
               |      |      |      |                  `--> z+2
    level 1    +1     +2     +3     +4
               |      |      |      |
    level 2    +2     +3     +4     +5

Each node sees the cached prefix, its ancestors and itself, so the parents are all that attention needs. Level 0 and
column 0 are paths behind `c` like those of the draft tree: a walk may accept their tokens too. The nodes of the last
level sample the columns' next tokens.

S: nodes; W: columns that fit the context; N: n-gram size, so N - 1 levels.
Node order: `c` and level 0 (W nodes, or `c` alone), levels 1..N-2 (W each), then the draft tree's own nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lp.compiled import compiled_array, compiled_ints, jit
from lp.config import LookaheadConfig
from lp.draft.tree import DraftTree, DraftTreeBuilder
from lp.draft.window import LookaheadWindow


def ancestors(parents: Sequence[int], known: np.ndarray | None = None) -> np.ndarray:
    """Visibility (S, S) of a tree given in topological order: [i, j] is whether node i sees node j.

    Args:
        parents: parent of every node, -1 for the root.
        known: the same for the first nodes, if computed before.
    """
    visible = np.zeros((len(parents), len(parents)), dtype=np.bool_)
    done = 0 if known is None else len(known)
    if known is not None:
        visible[:done, :done] = known
    _inherit(compiled_array(visible), compiled_ints(parents), done)
    return visible


@jit
def _inherit(visible, parents, done):  # type: ignore[no-untyped-def]
    for node in range(done, len(parents)):
        if parents[node] >= 0:
            for above in range(node):
                visible[node, above] = visible[parents[node], above]
        visible[node, node] = True


@lru_cache(maxsize=256)
def _window_tree(columns: int, levels: int) -> tuple[tuple[int, ...], tuple[int, ...], np.ndarray]:
    """Parents, distances from p, and visibility of the window's nodes."""
    level_0 = max(columns, 1)
    nodes = [(0, j) for j in range(level_0)] + [(k, j) for k in range(1, levels) for j in range(columns)]
    parents = [j - 1 if k == 0 else j if k == 1 else level_0 + (k - 2) * columns + j for k, j in nodes]
    return tuple(parents), tuple(k + j for k, j in nodes), ancestors(parents)


class StepLayout:
    """Tokens, positions and parents of the nodes of one step, equal on every rank.

    Args:
        window: its levels; `window_size` may be 0.
        draft: the proposed tree; nodes that repeat level 0 or column 0 share their nodes.
        token: `c`.
        position: p, of `c`.
        limit: positions below it may be used; nodes past it are dropped, whole columns at a time.

    Attributes:
        tokens, positions, parents: lists of S ints; the parent of `c` is -1.
        levels: N - 1.
        columns: columns that fit below the limit.
        num_window: nodes of `c` and the window; the draft tree's own follow.
        sampled_nodes: nodes whose token is sampled, ascending.
    """

    def __init__(self, window: LookaheadWindow, draft: DraftTree, token: int, position: int, limit: int) -> None:
        self.levels = window.ngram_size - 1
        self.columns = max(min(window.window_size, limit - position - self.levels + 1), 0)
        parents, distances, self._window_visible = _window_tree(self.columns, self.levels)
        self.tokens = [token, *window.levels[0][1 : self.columns]]
        for level in window.levels[1:]:
            self.tokens += level[: self.columns]
        self.parents = list(parents)
        self.positions = [position + distance for distance in distances]
        self.num_window = len(self.tokens)
        self._children = self._window_children() if draft.merge else {}  # (parent, token) -> nodes
        self._add_draft(draft, limit)
        self._drafts: dict[int, list[int]] = {}  # filled when first asked for
        self.sampled_nodes = self._find_sampled()

    def __len__(self) -> int:
        return len(self.tokens)

    def window_node(self, level: int, column: int) -> int:
        """The node of a window entry."""
        return column if level == 0 else max(self.columns, 1) + (level - 1) * self.columns + column

    def last_level(self) -> range:
        """Nodes that sample the columns' new tokens: (columns,)."""
        first = self.window_node(self.levels - 1, 0)
        return range(first, first + self.columns)

    def column_0(self) -> range:
        """Nodes of column 0 below level 0."""
        first = self.window_node(1, 0)
        return range(first, first + (self.levels - 1) * self.columns, max(self.columns, 1))

    def children(self, node: int, token: int) -> list[int]:
        """The sampled nodes right behind `node` with this token: of level 0, of column 0 or of the draft tree."""
        return self._children.get((node, token), [])

    def drafts(self, node: int) -> list[int]:
        """The different tokens that may follow the node in a walk, in the order they were laid out."""
        if not self._drafts:
            for parent, token in self._children:
                self._drafts.setdefault(parent, []).append(token)
        return self._drafts.get(node, [])

    def path(self, node: int) -> list[int]:
        """Nodes from `c` to this one, both included."""
        path = [node]
        while (node := self.parents[node]) >= 0:
            path.append(node)
        return path[::-1]

    def branch_tokens(self, node: int) -> list[int] | None:
        """The tokens behind `c` up to the node, which logits processors see as the end of its text.

        None for a node that no walk reaches: it only guesses, and logits processors leave it out.
        """
        return [self.tokens[above] for above in self.path(node)[1:]] if self.reachable(node) else None

    def reachable(self, node: int) -> bool:
        """Whether a walk may reach the node: it is of level 0, of column 0 or of the draft tree."""
        return node >= self.num_window or node < max(self.columns, 1) or (node - self.columns) % self.columns == 0

    def visible(self) -> np.ndarray:
        """Visibility (S, S), bool."""
        return ancestors(self.parents, self._window_visible)

    def _window_children(self) -> dict[tuple[int, int], list[int]]:
        """Those of level 0 and column 0, in which the same token may stand behind `c`."""
        children: dict[tuple[int, int], list[int]] = {}
        for node in (*range(1, self.columns), *self.column_0()):
            children.setdefault((self.parents[node], self.tokens[node]), []).append(node)
        return children

    def _add_draft(self, draft: DraftTree, limit: int) -> None:
        tokens, parents, positions, children = self.tokens, self.parents, self.positions, self._children
        nodes: list[int] = []  # of every node of the draft tree, its node here; -1 where it is past the limit
        for token, draft_parent in zip(draft.tokens, draft.parents, strict=True):
            parent = nodes[draft_parent] if draft_parent >= 0 else 0
            position = positions[parent] + 1
            if parent < 0 or position >= limit:
                nodes.append(-1)
                continue
            siblings = children.get((parent, token))
            if siblings and draft.merge:
                nodes.append(siblings[0])
                continue
            node = len(tokens)
            if siblings:
                siblings.append(node)
            else:
                children[parent, token] = [node]
            nodes.append(node)
            tokens.append(token)
            parents.append(parent)
            positions.append(position)

    def _find_sampled(self) -> list[int]:
        if self.levels == 1 or not self.columns:
            return list(range(len(self.tokens)))
        drafts = [*range(self.columns), *self.column_0()[:-1]]  # column 0's last node is of the last level
        return [*drafts, *self.last_level(), *range(self.num_window, len(self.tokens))]


def largest_layout(config: LookaheadConfig) -> StepLayout:
    """The largest step there can be: all columns, and all draft tokens in paths that share nothing."""
    budget, depth = config.draft_budget, config.depth
    builder = DraftTreeBuilder(budget)
    for first in range(0, budget, depth):
        builder.add_path(-1 - index for index in range(first, min(first + depth, budget)))
    return StepLayout(LookaheadWindow(config.window_size, config.ngram_size, [0]), builder.build(), 0, 0, sys.maxsize)
