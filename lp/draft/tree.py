"""The draft tree: tokens that are proposed to follow the newest token of the text, for the model to verify."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lp.errors import UserError


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The draft tokens of one decode step, as an immutable tree whose root is the newest token of the text.

    The root itself is not listed. Parents come before their children.

    Attributes:
        tokens: token id of every node.
        parents: index of every node's parent; -1 stands for the root.
        accept_probs: probability that the node and all its ancestors are accepted; empty if the draft source states
            none.
        merge: whether a node is computed only once if it repeats a sibling or a draft token of the window. False: each
            path has its own nodes, as in the paper.
    """

    tokens: Sequence[int] | np.ndarray = ()
    parents: Sequence[int] | np.ndarray = ()
    accept_probs: Sequence[float] | np.ndarray = ()
    merge: bool = True

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self) -> None:
        """Raise an error if the arrays do not describe a tree.

        Raises:
            ValueError: the arrays differ in length, or a node comes before its parent.
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
    """Builds a draft tree from paths of tokens, up to a limited number of nodes.

    Args:
        budget: most nodes of the tree.
        merge: whether paths with the same first tokens share the nodes of these tokens.
    """

    budget: int
    merge: bool = True
    tokens: list[int] = field(default_factory=list, init=False)
    parents: list[int] = field(default_factory=list, init=False)
    _children: dict[tuple[int, int], int] = field(default_factory=dict, init=False)  # (parent, token) -> node

    def add_path(self, path: Iterable[int]) -> None:
        """Add a path of tokens that begins after the root; tokens beyond the budget are left out.

        Args:
            path: token ids.
        """
        node = -1
        for token in path:
            child = self.add_child(node, token)
            if child is None:
                return
            node = child

    def add_child(self, node: int, token: int) -> int | None:
        """Find the child of a node that has a given token, or add it.

        Args:
            node: index of the parent; -1 stands for the root.
            token: token id of the child.

        Returns:
            Index of the child; None if the budget leaves no room for a new node.
        """
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
        """Make the draft tree from all paths and children added so far."""
        return DraftTree(self.tokens, self.parents, merge=self.merge)
