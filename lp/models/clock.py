"""Clocks that time work on a device; on a CPU they count this thread's time, which other programs do not lengthen."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lp.parallel.replica import Replica


def clock_of(device: torch.device, replica: Replica | None = None) -> Callable[[], float]:
    """Get a clock that times work on a device: the difference of two calls is the seconds that the work took.

    On a CPU it counts this thread's processor time, which other programs do not lengthen. On a GPU each call waits
    until the device has done all it was asked to, then reads the host's clock.

    Args:
        device: the device that the work runs on.
        replica: the ranks that take part in the timed work, since they divide the model; None: this rank alone.
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
    """Get a clock that counts seconds of this thread's processor time, or of wall time if that clock is coarse."""
    return time.thread_time if time.get_clock_info("thread_time").resolution < 1e-4 else time.perf_counter
