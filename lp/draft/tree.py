"""The draft tree: tokens proposed for verification behind the newest token of the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lp.errors import UserError


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens behind the newest token of the text, the root, which is not one of them; never changed once made.

    Nodes are in topological order: a parent comes before its children.

    Attributes:
        tokens: token of every node.
        parents: index of every node's parent; -1 is the root.
        accept_probs: probability that each node is accepted with all its ancestors; empty where the source states none.
        merge: a node that repeats a sibling or a draft of the window shares its node in the step. False is the paper's
            layout: paths lie side by side, and no two nodes are shared.
    """

    tokens: Sequence[int] | np.ndarray = ()
    parents: Sequence[int] | np.ndarray = ()
    accept_probs: Sequence[float] | np.ndarray = ()
    merge: bool = True

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self) -> None:
        """Refuse what is no tree.

        Raises:
            ValueError: the lists differ in length, or a node comes before its parent.
        """
        tokens, parents, probs = len(self.tokens), len(self.parents), len(self.accept_probs)
        if parents != tokens or probs not in (0, tokens):
            raise UserError(
                f"a draft tree has {tokens} tokens, {parents} parents and {probs} accept_probs; give one of each for "
                "every node, or no accept_probs"
            )
        if not all(-1 <= parent < node for node, parent in enumerate(self.parents)):
            raise UserError("a node of a draft tree comes before its parent; list parents first, -1 for the root")


@dataclass(slots=True)
class DraftTreeBuilder:
    """Makes a draft tree of paths, within a budget of nodes.

    Args:
        budget: most nodes the tree may have.
        merge: see `DraftTree`.
    """

    budget: int
    merge: bool = True
    tokens: list[int] = field(default_factory=list, init=False)
    parents: list[int] = field(default_factory=list, init=False)
    _children: dict[tuple[int, int], int] = field(default_factory=dict, init=False)  # (parent, token) -> node

    def add_path(self, path: Iterable[int]) -> None:
        """Insert a path from the root: the prefix that the tree has is shared, what exceeds the budget is left out."""
        node = -1
        for token in path:
            child = self.add_child(node, token)
            if child is None:
                return
            node = child

    def add_child(self, node: int, token: int) -> int | None:
        """The child of a node (-1 is the root) with this token, added if there is none; None beyond the budget."""
        child = self._children.get((node, token)) if self.merge else None
        if child is not None:
            return child
        if len(self.tokens) >= self.budget:
            return None
        child = len(self.tokens)
        self._children[node, token] = child
        self.tokens.append(token)
        self.parents.append(node)
        return child

    def build(self) -> DraftTree:
        """The draft tree of the paths that were added."""
        return DraftTree(self.tokens, self.parents, merge=self.merge)
