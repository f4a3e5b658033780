"""Waits of the host for its GPU, where the GPU may be waiting for a rank that is gone."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)
ABORT_S = 10.0  # how long NCCL may take to end what it has under way
EXIT_S = 30  # how long a process that has lost another one may take to end
_yield: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))  # lets other threads run


class DeviceWaits:
    """The waits of one rank: each ends with the device's work, or after a limit with an error.

    A collective of NCCL ends when the last rank has come; where a rank has gone it never does, and neither does the
    graph that replays it, nor what is behind it on the device. Torch watches the collectives that it starts, and ends
    the process; those that a graph replays nobody watches. So the host asks the device until it is done, which costs a
    step no more than waiting for it, and looks at the clock meanwhile.

    Args:
        timeout_s: the limit.

    Attributes:
        timeout_s: may be changed between waits.
        groups: process groups of NCCL.
        graphs: CUDA graphs that may hold such collectives.
        given_up: a rank was lost: the device may never be done with what waits for it.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.groups: list[dist.ProcessGroup] = []
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.given_up = False
        self._abandoned = False

    def until(self, event: torch.cuda.Event) -> None:
        """Wait for the work before an event.

        Raises:
            RuntimeError: the device was not done with it in time, now or before.
        """
        if self.given_up:
            raise RuntimeError("the GPU still waits for another rank")
        end = 0.0
        while not event.query():
            now = time.monotonic()
            end = end or now + self.timeout_s
            if now > end:
                self.given_up = True
                raise RuntimeError(f"the GPU was not done with its work after {self.timeout_s:g} s")
            _yield()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's values on the host, by one wait.

        Raises:
            RuntimeError: as `until`.
        """
        if not tensor.is_cuda:
            return tensor.cpu()
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        values.copy_(tensor, non_blocking=True)
        self.until(torch.cuda.current_stream(tensor.device).record_event())
        return values

    def abandon(self) -> None:
        """End the collectives that wait on the device, as far as torch can, and let this process end soon in any case.

        Nobody may use the groups behind it.
        """
        if self._abandoned:
            return
        self.given_up = self._abandoned = True
        atexit.register(_end_within, EXIT_S)
        aborting = threading.Thread(target=_abort, args=(self.groups,), daemon=True)
        aborting.start()
        self.free_graphs()  # NCCL waits for them, here too
        aborting.join(ABORT_S)
        if aborting.is_alive():
            logger.warning("NCCL does not end what waits for the lost rank, so this process ends in %d s", EXIT_S)
            _end_within(EXIT_S)

    def free_graphs(self) -> None:
        """Free the graphs, whoever still refers to them."""
        for graph in self.graphs:
            graph.reset()


def _abort(groups: list[dist.ProcessGroup]) -> None:
    """Abort NCCL's communicators, together: one may wait for the kernel of another."""
    backends: list[Any] = [group._get_backend(torch.device("cuda")) for group in {*groups}]
    able = [backend for backend in backends if hasattr(backend, "abort")]  # not in every version of torch
    together = [backend for backend in able[:1] if hasattr(backend, "_group_start")]
    for backend in together:
        backend._group_start()
    for backend in able:
        backend.abort()
    for backend in together:
        backend._group_end()


def _end_within(seconds: int) -> None:
    """Let the system end this process then: what hangs in a library at the end does not run Python any more."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)
