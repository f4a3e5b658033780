"""Measures step times: steps of every size in alternation, for a few seconds, and once more what is doubtful."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from lp.budget.step_times import PADDING_GAIN, StepTimes
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
# The two fastest steps of a size differ by this factor at most, or the machine was busy in all of them.
SPREAD = 1.25
# A size that is slower than a larger one is believed after so many steps.
SURE_STEPS = 4
# A plain step has less to do than any other; what it takes beyond this factor is noise.
PLAIN_NOISE = 1.1
# How long doubtful sizes are measured again.
DOUBTS_S = 5.0
DIGITS = 7  # of a second: a file of step times is for people, too


class Measurement(NamedTuple):
    """Step times, and how far they can be trusted.

    Attributes:
        times: the fastest step of every size.
        doubtful: sizes that a busy machine may have slowed down, 0 for the plain step; none if all can be trusted.
    """

    times: StepTimes
    doubtful: tuple[int, ...]


def measure_step_times(step: Callable[[int], float], max_tokens: int, context: ParallelContext) -> Measurement:
    """Time steps of every size and take the fastest of each, since what else a machine does only ever adds time.

    Args:
        step: takes a step of so many tokens on all ranks and returns its seconds on this rank; 0 is a plain step.
        max_tokens: the largest step.
        context: the ranks; all take rank 0's times.
    """
    seconds: dict[int, list[float]] = {}  # by size, the fastest first

    def time_step(size: int) -> float:
        taken = float(context.broadcast(torch.tensor([step(size)], dtype=torch.float64), 0))
        seconds[size] = sorted([*seconds.get(size, ()), taken])
        return taken

    sizes = [0, *(size for size in SIZES if size < max_tokens), max_tokens]
    for size in sizes[:2]:
        time_step(size)  # compiles, allocates
    seconds.clear()
    for size in sizes:
        if size > LARGE_SIZE and seconds[max(seconds)][0] > LARGE_PLAIN_STEPS * seconds[0][0]:
            break
        slow_model = sum(times[0] for times in seconds.values()) > FIRST_ROUNDS_S
        if slow_model and size not in (*FEW_SIZES, max_tokens):
            continue
        for _ in range(1 if slow_model else 2):
            time_step(size)
        limit_s = MAX_PLAIN_STEPS * seconds[0][0]
        if limit_s < seconds[size][0] < SHORT_STEP_S:
            for _ in range(4):
                time_step(size)
        if seconds[size][0] > limit_s:
            break
    spent_s = 2 * sum(times[0] for times in seconds.values())
    usable = [size for size in seconds if seconds[size][0] <= MAX_PLAIN_STEPS * seconds[0][0]]
    for turn in range(1, ROUNDS):
        if spent_s > (FIRST_ROUNDS_S if turn < FIRST_ROUNDS else LATER_ROUNDS_S):
            break
        spent_s += sum(time_step(size) for size in (usable if turn % 2 else reversed(usable)))
    spent_s = 0.0
    while spent_s < DOUBTS_S and (doubtful := doubtful_sizes({size: seconds[size] for size in usable})):
        spent_s += sum(time_step(size) for size in doubtful)
    doubtful = doubtful_sizes({size: seconds[size] for size in usable})
    fastest = {size: round(times[0], DIGITS) for size, times in seconds.items()}
    plain_s = fastest.pop(0)
    return Measurement(StepTimes(tuple(fastest), tuple(fastest.values()), plain_s), doubtful)


def doubtful_sizes(seconds: dict[int, list[float]]) -> tuple[int, ...]:
    """Sizes that a busy machine may have slowed down in every step.

    Args:
        seconds: by size, ascending, of its steps, the fastest first; 0 is the plain step.
    """
    doubtful = {size for size, times in seconds.items() if len(times) > 1 and times[1] > SPREAD * times[0]}
    sizes = [*seconds]
    for index, size in enumerate(sizes[1:-1], start=1):
        fastest = min(sizes[index + 1 :], key=lambda larger: seconds[larger][0])
        if seconds[fastest][0] < PADDING_GAIN * seconds[size][0]:  # true of some processors, as StepTimes says
            doubtful |= {each for each in (size, fastest) if len(seconds[each]) < SURE_STEPS}
    if seconds[0][0] > PLAIN_NOISE * min(times[0] for size, times in seconds.items() if size):
        doubtful.add(0)
    return tuple(sorted(doubtful))
