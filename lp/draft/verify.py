"""Verification: which of the step's guesses the model itself would have said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lp.draft.layout import StepLayout
from lp.sampling.sampler import INVALID_TOKEN


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step decided.

    Attributes:
        path: nodes from `c` to the last accepted one, `c` included.
        tokens: the accepted tokens and the bonus token, at least one.
        sampled_at: nodes whose read-offs the tokens are; of nodes that repeat each other, perhaps not the one in `path`.
    """

    path: list[int]
    tokens: list[int]
    sampled_at: list[int]

    @property
    def accepted(self) -> int:
        """Accepted tokens, without the bonus."""
        return len(self.tokens) - 1


def walk(layout: StepLayout, read: Mapping[int, int], depth: int | None = None) -> Outcome:
    """Walk the tree from `c`: the token a node chose is the truth; while a child carries it, go on (Algorithm 3).

    Greedy, coupled and rejection sampling differ in how a row chooses its token alone (`lp.sampling.sampler`):
    each choice has the model's own distribution given the node's path, so the walked tokens have it too.

    Args:
        layout: the step's tree.
        read: token chosen by every node in `layout.sampled_nodes`.
        depth: most tokens to accept; None for no limit, 0 verifies nothing.
    """
    front, sampled_at, tokens = [0], [0], [read[0]]
    while depth is None or len(tokens) <= depth:
        children = (child for node in front for child in layout.children(node, tokens[-1]))
        front = [child for child in children if read[child] != INVALID_TOKEN]  # its own step says what is wrong with it
        if not front:
            break
        sampled_at.append(front[0])
        tokens.append(read[front[0]])
    return Outcome(layout.path(sampled_at[-1]), tokens, sampled_at)
