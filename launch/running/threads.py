"""How many threads compute a decode step on a CPU: fewer than torch takes, where that is faster beside other programs.

Threads of one matrix product wait for each other: on busy cores, two were up to four times slower than one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

ROUNDS = 5  # of each number of threads, in alternation
ROUND_S = 0.03  # a round takes about so long, or a thread that is put to sleep would be missed
MOST_LINEARS = 16
# Fewer threads are taken where they need less than this share of the time.
WORTH = 0.9


def settle_threads(model: nn.Module) -> str:
    """Set torch's number of threads to the fastest one for a decode step now, found by a trial of its matrix products.

    The number stays as it is if OMP_NUM_THREADS is set, if the model is on a GPU, or if torch takes one thread anyway.

    Args:
        model: loaded, on its device.

    Returns:
        A line for the user: the number and why; "" where torch's own number stays.
    """
    usual = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ or usual == 1 or next(model.parameters()).device.type != "cpu":
        return ""
    work = _products(model)
    if work is None:
        return ""
    seconds = {usual: 0.0, max(usual // 2, 1): 0.0, 1: 0.0}
    with torch.inference_mode():
        start = time.perf_counter()
        work()
        repeats = max(1, int(ROUND_S / max(time.perf_counter() - start, 1e-6)))
        for _ in range(ROUNDS):
            for count in seconds:
                torch.set_num_threads(count)
                seconds[count] += _seconds(work, repeats)
    best = fastest(seconds, usual)
    torch.set_num_threads(best)
    if best == usual:
        return ""
    return (
        f"threads: {best}, which now takes {seconds[best] / seconds[usual]:.2f} of the time of {usual}; "
        f"OMP_NUM_THREADS={usual} takes {usual}"
    )


def fastest(seconds: dict[int, float], usual: int) -> int:
    """The number of threads to take: the usual one, unless another takes less than 0.9 (WORTH) of its time.

    Args:
        seconds: measured seconds by number of threads.
        usual: torch's own number, one of those measured.
    """
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < WORTH * seconds[usual] else usual


def _products(model: nn.Module) -> Callable[[], None] | None:
    """A function that computes matrix products of decode steps with some of the model's weights; None: it has none."""
    linears: Iterable[nn.Linear] = (module for module in model.modules() if type(module) is nn.Linear)
    weights = [linear.weight for linear in linears if linear.weight.is_floating_point()][:MOST_LINEARS]
    if not weights:
        return None
    rows = [(weight, torch.ones(size, weight.shape[1], dtype=weight.dtype)) for weight in weights for size in (1, 8)]

    def work() -> None:
        for weight, x in rows:
            nn.functional.linear(x, weight)

    return work


def _seconds(work: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return time.perf_counter() - start
