"""Verification: which of the step's guesses the model itself would have said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lp.draft.layout import StepLayout
from lp.parallel.message import INVALID_TOKEN


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step decided.

    Attributes:
        path: slots from `c` to the last accepted one, `c` included.
        tokens: the accepted tokens and the bonus token, at least one.
        chose: slots whose read-offs the tokens are; of slots that repeat each other, perhaps not the one in `path`.
    """

    path: list[int]
    tokens: list[int]
    chose: list[int]

    @property
    def accepted(self) -> int:
        """Accepted tokens, without the bonus."""
        return len(self.tokens) - 1


def walk(layout: StepLayout, read: Mapping[int, int], depth: int | None = None) -> Outcome:
    """Walk the tree from `c`: the token a slot chose is the truth; while a child carries it, go on (Algorithm 3).

    Greedy, coupled and rejection sampling differ in how a row chooses its token alone (`lp.sampling.sampler`):
    each choice has the model's own distribution given the slot's path, so the walked tokens have it too.

    Args:
        layout: the step's tree.
        read: token chosen by every slot in `layout.reads`.
        depth: most tokens to accept; None for no limit, 0 verifies nothing.
    """
    front, chose, tokens = [0], [0], [read[0]]
    while depth is None or len(tokens) <= depth:
        children = (child for slot in front for child in layout.children(slot, tokens[-1]))
        front = [child for child in children if read[child] != INVALID_TOKEN]  # its own step says what is wrong with it
        if not front:
            break
        chose.append(front[0])
        tokens.append(read[front[0]])
    return Outcome(layout.path(chose[-1]), tokens, chose)
