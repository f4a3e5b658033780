"""Clocks that tell what work takes: on a CPU this thread's own, which other programs do not lengthen."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lp.parallel.replica import Replica


def clock_of(device: torch.device, replica: Replica | None = None) -> Callable[[], float]:
    """The clock that tells what work on a device takes, in seconds: on a CPU this thread's, which other programs do not
    slow down; on a GPU the host's, once the device has done what was asked of it.

    Args:
        replica: the ranks that the timed work waits for; None: this one alone.
    """
    ranks = replica or Replica()
    if device.type == "cpu":
        return thread_clock()

    def synchronised() -> float:
        if device.type == "cuda":
            ranks.wait_for(torch.cuda.current_stream(device).record_event())
        return time.perf_counter()

    return synchronised


def thread_clock() -> Callable[[], float]:
    """Seconds of this thread's processor; of the wall where the system counts them in coarse steps."""
    return time.thread_time if time.get_clock_info("thread_time").resolution < 1e-4 else time.perf_counter
