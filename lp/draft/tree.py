"""The draft tree: token paths behind the last generated token that share their common prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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

    def foretold(self, text: Sequence[int]) -> tuple[float, int]:
        """How many tokens of what came the chances promised, each given the one before, and how many the tree had.

        Both are 0 where the source states no chances.
        """
        if not self.accept_probs:
            return 0.0, 0
        mass = [0.0] * (len(self) + 1)  # of a node's children, given the node
        child = {}
        for node, (token, parent, chance) in enumerate(zip(self.tokens, self.parents, self.accept_probs, strict=True)):
            mass[parent] += chance / self.accept_probs[parent] if parent >= 0 else chance
            child[parent, token] = node
        node, expected, came = -1, 0.0, 0
        for token in text:
            expected += mass[node]
            if (node, token) not in child:
                break
            node, came = child[node, token], came + 1
        return expected, came
