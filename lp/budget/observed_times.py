"""Step times corrected by the steps that follow: those of a text tell whether the times of their sizes agree.

Only their ratios matter: a machine that is busy throughout a text slows down all of its steps, and changes no decision.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from statistics import median
from typing import Protocol

import numpy as np

from lp.budget.measure import DIGITS
from lp.budget.step_times import StepTimes

# Steps of a size that tell something; less may be what else the machine did.
LEAST_STEPS = 8
# The sizes of a text may differ by this factor in what they take of their step times: that is noise, or the length of
# the text.
TOLERANCE = 1.25
# The share of a deviation, in logarithms, that one text corrects: the machine may have been busy in a part of it.
SHARE = 0.5


class TimedStep(Protocol):
    """The statistics of a step that are read here, as in StepStats."""

    @property
    def most_tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def idle(self) -> bool: ...


def corrected(times: StepTimes, steps: Sequence[TimedStep]) -> StepTimes:
    """The step times, moved towards what the steps of a text took; the same ones where these agree with them.

    Sizes between those of the text are moved by what lies between, others as their nearest ones.

    Args:
        times: by which the budget decided.
        steps: that computed nothing else than this text.
    """
    shares: dict[int, list[float]] = {}  # by size measured, 0 for the plain step: of its step times
    for step in steps:
        size = 0 if step.idle else times.padded_size(step.most_tokens)
        if size <= times.max_tokens:
            expected = times.step_s(size) if size else times.plain_s
            shares.setdefault(_measured_size(times, size), []).append(step.seconds / expected)
    known = {size: median(all_of) for size, all_of in sorted(shares.items()) if len(all_of) >= LEAST_STEPS}
    if not known or max(known.values()) <= TOLERANCE * min(known.values()):
        return times
    usual = known[max(known, key=lambda size: len(shares[size]))]
    moves = {size: (share / usual) ** SHARE for size, share in known.items()}
    plain_move = moves.pop(0, None)
    by_size = np.exp(np.interp(np.log(times.num_tokens), np.log([*moves]), np.log([*moves.values()]))).tolist()
    seconds = (round(old * move, DIGITS) for old, move in zip(times.seconds, by_size, strict=True))
    plain_s = round(times.plain_s * (by_size[0] if plain_move is None else plain_move), DIGITS)
    return StepTimes(times.num_tokens, tuple(seconds), plain_s)


def _measured_size(times: StepTimes, size: int) -> int:
    """The size measured that this one is nearest to; 0 is the plain step."""
    if not size:
        return 0
    at = bisect_left(times.num_tokens, size)
    nearest = times.num_tokens[max(at - 1, 0) : at + 1]
    return min(nearest, key=lambda measured: abs(np.log(measured / size)))
