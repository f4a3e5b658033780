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
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lp.compiled import compiled_array, compiled_ints, jit
from lp.draft.tree import DraftTree
from lp.draft.window import LookaheadWindow, WindowSlice


def ancestors(parents: Sequence[int], known: np.ndarray | None = None) -> np.ndarray:
    """Visibility (S, S) of a tree given in topological order: [i, j] is whether node i sees node j.

    Args:
        parents: parent of every node, -1 for the root.
        known: the same for the first nodes, if computed before.
    """
    if known is not None and len(known) == len(parents):
        return known.copy()
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


@dataclass(frozen=True, slots=True)
class _WindowNodes:
    """The nodes of `c` and of a slice of the window.

    Attributes:
        parents, distances: of every node; distance from p.
        visible: (nodes, nodes).
        on_walk: those that a walk may reach: `c`, level 0 and column 0.
        sampled: those whose token is sampled: those on a walk, and the last level.
    """

    parents: list[int]
    distances: list[int]
    visible: np.ndarray
    on_walk: frozenset[int]
    sampled: list[int]


@lru_cache(maxsize=256)
def _window_nodes(columns: WindowSlice) -> _WindowNodes:
    entries = [(0, j) for j in range(columns.level_0_nodes)]
    entries += [(k, j) for k in range(1, columns.levels) for j in range(columns.first, columns.end)]
    index = {entry: node for node, entry in enumerate(entries)}
    parents = [index[k - 1, j] if k else j - 1 for k, j in entries]
    on_walk = frozenset(node for node, (k, j) in enumerate(entries) if k == 0 or j == 0)
    last = range(columns.first_of_last_level, len(entries))
    return _WindowNodes(
        parents=parents,
        distances=[k + j for k, j in entries],
        visible=ancestors(parents),
        on_walk=on_walk,
        sampled=sorted(on_walk.union(last)),
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
        tokens, positions, parents: lists of S ints; the parent of `c` is -1.
        accept_probs: of every node; 0 where the draft source states none.
        num_window: nodes of `c` and the window; the draft tree's own follow.
        sampled_nodes: nodes whose token is sampled, ascending.
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
        self.tokens = [token, *window.levels[0][1 : columns.level_0_nodes]]
        for level in window.levels[1:]:
            self.tokens += level[columns.first : columns.end]
        self.parents = list(self._window.parents)
        self.positions = [position + distance for distance in self._window.distances]
        self.num_window = len(self.tokens)
        self.accept_probs = [0.0] * self.num_window
        self._children = self._window_children() if draft.merge else {}  # (parent, token) -> node
        self._add_draft(draft, limit)
        self.sampled_nodes = [*self._window.sampled, *range(self.num_window, len(self.tokens))]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.catch_up) + len(self.tokens)

    def drafts(self) -> dict[int, list[int]]:
        """By node, the different tokens that may follow it in a walk, in the order they were laid out."""
        drafts: dict[int, list[int]] = {}
        for parent, token in self._children:
            drafts.setdefault(parent, []).append(token)
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
        return node >= self.num_window or node in self._window.on_walk

    def step_tokens(self, num_tokens: int) -> tuple[list[int], list[int], np.ndarray]:
        """Tokens and positions (T,) and visibility (T, T) of the forward pass: catch-up tokens, then the nodes.

        Args:
            num_tokens: where larger than T, tokens are added that nothing sees and nothing is sampled at.
        """
        missing = len(self.catch_up)
        used = self.num_tokens
        more = max(num_tokens - used, 0)
        visible = ancestors(self.parents, self._window.visible)
        if missing or more:
            nodes = visible
            visible = np.tri(used + more, dtype=bool)
            visible[missing:used, missing:used] = nodes
            visible[used:] = np.eye(used + more, dtype=bool)[used:]
        start = self.positions[0] - missing
        tokens = [*self.catch_up, *self.tokens, *self.tokens[:1] * more]
        positions = [*range(start, start + missing), *self.positions, *self.positions[:1] * more]
        return tokens, positions, visible

    def _window_children(self) -> dict[tuple[int, int], int]:
        """Those of level 0 and column 0; where both begin with the same tokens, the node of level 0 stands for both."""
        children: dict[tuple[int, int], int] = {}
        stands_for = {0: 0}
        for node in sorted(self._window.on_walk)[1:]:
            parent = stands_for[self.parents[node]]
            stands_for[node] = children.setdefault((parent, self.tokens[node]), node)
        return children

    def _add_draft(self, draft: DraftTree, limit: int) -> None:
        nodes: list[int] = []  # of every node of the draft tree, its node here; -1 where it is past the limit
        probs = draft.accept_probs or [0.0] * len(draft)
        for token, draft_parent, prob in zip(draft.tokens, draft.parents, probs, strict=True):
            parent = nodes[draft_parent] if draft_parent >= 0 else 0
            position = self.positions[parent] + 1
            if parent < 0 or position >= limit:
                nodes.append(-1)
                continue
            node = self._children.get((parent, token), -1)
            if node < 0 or not draft.merge:
                node = len(self.tokens)
                self._children.setdefault((parent, token), node)
                self.tokens.append(token)
                self.parents.append(parent)
                self.positions.append(position)
                self.accept_probs.append(prob)
            self.accept_probs[node] = prob
            nodes.append(node)
