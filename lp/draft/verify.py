"""Verification: which draft tokens the model itself sampled."""

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
        sampled_at: nodes that sampled these tokens; of nodes that repeat each other, perhaps not the one in `path`.
    """

    path: list[int]
    tokens: list[int]
    sampled_at: list[int]

    @property
    def accepted(self) -> int:
        """Accepted tokens, without the bonus token."""
        return len(self.tokens) - 1


def walk(layout: StepLayout, sampled: Mapping[int, int], depth: int | None = None) -> Outcome:
    """Walk the tree from `c`: follow the child with the token that a node sampled, while there is one (Algorithm 3).

    Greedy, coupled and rejection sampling differ only in how a node samples its token (`lp.sampling.sampler`): each
    sample has the model's own distribution given the node's path, so the walked tokens have it too.

    Args:
        layout: the step's tree.
        sampled: token of every node in `layout.sampled_nodes`.
        depth: most tokens to accept; None for no limit, 0 verifies nothing.
    """
    front = [0]  # nodes with the same path of tokens
    sampled_at = [0]
    tokens = [sampled[0]]
    while depth is None or len(tokens) <= depth:
        children = (child for node in front for child in layout.children(node, tokens[-1]))
        front = [child for child in children if sampled[child] != INVALID_TOKEN]  # an error only if it is reached alone
        if not front:
            break
        sampled_at.append(front[0])
        tokens.append(sampled[front[0]])
    return Outcome(layout.path(sampled_at[-1]), tokens, sampled_at)
