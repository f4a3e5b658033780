"""The draft tree: token paths behind the last generated token that share their common prefixes."""

from __future__ import annotations

from collections.abc import Iterable


class DraftTree:
    """Candidate paths that share their common prefixes, within a budget of nodes.

    Args:
        budget: most nodes the tree may hold.
        merge: paths share slots with each other and with the window; False lays each out on its own.
    """

    def __init__(self, budget: int, merge: bool = True) -> None:
        self.budget, self.merge = budget, merge
        self.tokens: list[int] = []
        self.parents: list[int] = []  # -1 is the root: the last generated token
        self.accept_probs: list[float] = []  # of being accepted, where the source states them
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.budget

    def add_path(self, path: Iterable[int]) -> None:
        """Insert a path from the root; what it shares is there already, what exceeds the budget is cut."""
        node = -1
        for token in path:
            child = self.add_child(node, token)
            if child is None:
                return
            node = child

    def add_child(self, node: int, token: int) -> int | None:
        """The child of a node (-1 is the root) that carries the token, made if the budget allows; else None."""
        child = self._child.get((node, token)) if self.merge else None
        if child is None and not self.full:
            child = self._child[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
        return child
