"""Measures step times: steps of every size in alternation, for a few seconds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lp.budget.step_times import StepTimes
from lp.parallel.context import ParallelContext

# Sizes of the steps that are measured, and those that must do on a slow model.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FEW_SIZES = (1, 8, 32, 128)
# Larger sizes than this are measured only if it takes at most so many plain steps: where it takes more, further tokens
# are dear, and they are the least likely ones. Set by hand.
LARGE_SIZE = 128
LARGE_PLAIN_STEPS = 3.0
# Sizes that take longer than so many plain steps never pay: they are not measured again, nor are larger ones.
MAX_PLAIN_STEPS = 16.0
# Rounds over all sizes, and the seconds after which they end: while fewer than FIRST_ROUNDS are complete, and later.
ROUNDS = 15
FIRST_ROUNDS = 4
FIRST_ROUNDS_S = 5.0
LATER_ROUNDS_S = 2.5
# A step that seems too slow but takes less than this is tried again: the machine may have been busy.
SHORT_STEP_S = FIRST_ROUNDS_S / 10


def measure_step_times(step: Callable[[int], float], max_tokens: int, context: ParallelContext) -> StepTimes:
    """Time steps of every size and take the fastest of each, since what else a machine does only ever adds time.

    Args:
        step: takes a step of so many tokens on all ranks and returns its seconds on this rank; 0 is a plain step.
        max_tokens: the largest step.
        context: the ranks; all take rank 0's times.
    """

    def time_step(size: int) -> float:
        return float(context.broadcast(torch.tensor([step(size)], dtype=torch.float64), 0))

    sizes = [0, *(size for size in SIZES if size < max_tokens), max_tokens]
    for size in sizes[:2]:
        time_step(size)  # compiles, allocates
    fastest: dict[int, float] = {}
    for size in sizes:
        if size > LARGE_SIZE and fastest[max(fastest)] > LARGE_PLAIN_STEPS * fastest[0]:
            break
        slow_model = sum(fastest.values()) > FIRST_ROUNDS_S
        if slow_model and size not in (*FEW_SIZES, max_tokens):
            continue
        fastest[size] = time_step(size) if slow_model else min(time_step(size), time_step(size))
        limit_s = MAX_PLAIN_STEPS * fastest[0]
        if limit_s < fastest[size] < SHORT_STEP_S:
            fastest[size] = min(fastest[size], *(time_step(size) for _ in range(4)))
        if fastest[size] > limit_s:
            break
    spent_s = 2 * sum(fastest.values())
    usable = [size for size in fastest if fastest[size] <= MAX_PLAIN_STEPS * fastest[0]]
    for turn in range(1, ROUNDS):
        if spent_s > (FIRST_ROUNDS_S if turn < FIRST_ROUNDS else LATER_ROUNDS_S):
            break
        for size in usable if turn % 2 else reversed(usable):
            seconds = time_step(size)
            spent_s += seconds
            fastest[size] = min(fastest[size], seconds)
    plain_s = fastest.pop(0)
    return StepTimes(tuple(fastest), tuple(fastest.values()), plain_s)
