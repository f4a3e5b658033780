"""Prior step times, before any step was timed: estimated from one timed layer and typical work of the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lp.budget.step_times import StepTimes
from lp.compiled import COMPILED

# Sizes, in tokens, whose step times are learned.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Larger sizes than this are learned only if it takes at most so many plain steps: where it takes more, further tokens
# are dear, and they are the least likely ones. Set by hand.
LARGE_SIZE = 128
LARGE_PLAIN_STEPS = 3.0
# A size that takes longer than so many plain steps never pays, and no larger one is learned.
MAX_PLAIN_STEPS = 16.0
# What drafting, learning and the message take a step's host beyond a plain one's, and every token of it: set by hand,
# for functions that numba compiles, and for Python's. The first steps correct it.
HOST_S, HOST_TOKEN_S = (0.5e-3, 10e-6) if COMPILED else (2e-3, 300e-6)


def prior_times(pass_s: Mapping[int, float], max_tokens: int) -> StepTimes:
    """Estimate step times from the times of forward passes, by adding typical times for the host's work.

    Sizes that are too slow ever to pay are left out.

    Args:
        pass_s: seconds of a forward pass by its number of tokens, for at least two sizes, ascending from 1.
        max_tokens: number of tokens in the largest step to estimate.
    """
    timed, seconds = [*pass_s], [*pass_s.values()]
    sizes = [*(size for size in SIZES if size < max_tokens), max_tokens]
    # Past the largest size timed a token costs what it did before it, and never less than nothing.
    slope = max(seconds[-1] - seconds[-2], 0.0) / (timed[-1] - timed[-2])
    passes = [
        seconds[-1] + slope * (size - timed[-1]) if size > timed[-1] else float(np.interp(size, timed, seconds))
        for size in sizes
    ]
    plain_s = min(passes[0], min(passes))  # a plain step may be padded
    kept = _learned(sizes, passes, plain_s)
    steps = [each + HOST_S + HOST_TOKEN_S * size for size, each in zip(sizes[:kept], passes, strict=False)]
    return StepTimes(tuple(sizes[:kept]), tuple(steps), plain_s)


def _learned(sizes: list[int], passes: list[float], plain_s: float) -> int:
    """How many of these sizes, the first, may ever pay; the step times of the others are not learned."""
    for count, (size, seconds) in enumerate(zip(sizes, passes, strict=True), start=1):
        if seconds > MAX_PLAIN_STEPS * plain_s:
            return count
        if size >= LARGE_SIZE and seconds > LARGE_PLAIN_STEPS * plain_s:
            return count
    return len(sizes)
