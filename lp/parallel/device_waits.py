"""Waiting for the GPU with a time limit, since a collective on it may hang on a rank that is gone.

`DeviceWaits.abandon` then aborts the GPU's collectives, so that this process can end.
"""

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
ABORT_S = 10.0  # seconds that NCCL may take to abort its collectives
EXIT_S = 30  # seconds that a process may take to end after it has lost a rank; then the system kills it
_yield: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))  # lets other threads run


class DeviceWaits:
    """Lets the host wait for one rank's GPU with a time limit: a wait ends with an error rather than never.

    A collective of NCCL ends when the last rank has come. If a rank is gone, the collective never ends, nor does a CUDA
    graph that replays it, nor any work queued after it on the GPU. Torch watches the collectives that it starts itself,
    and ends the process; nobody watches those that a graph replays. So the host polls the GPU until it is done, which
    costs a step no more than a blocking wait, and looks at the clock meanwhile.

    Args:
        timeout_s: most seconds of a wait.

    Attributes:
        timeout_s: most seconds of a wait; may be changed between waits.
        groups: the NCCL process groups of this rank, which `abandon` aborts.
        graphs: CUDA graphs that may hold collectives of these groups.
        given_up: whether a wait has failed, or `abandon` was called: the GPU may never be done with its work.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.groups: list[dist.ProcessGroup] = []
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.given_up = False
        self._abandoned = False

    def until(self, event: torch.cuda.Event) -> None:
        """Wait until the GPU has done all work recorded before an event.

        Raises:
            RuntimeError: the GPU was not done after `timeout_s` seconds, or an earlier wait has failed already.
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
        """Copy a tensor to the host, and wait for the copy.

        Raises:
            RuntimeError: the GPU was not done in time, see `until`.
        """
        if not tensor.is_cuda:
            return tensor.cpu()
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        values.copy_(tensor, non_blocking=True)
        self.until(torch.cuda.current_stream(tensor.device).record_event())
        return values

    def abandon(self) -> None:
        """Abort the collectives that hang on the GPU after a rank is lost, so that this process can end in good order.

        If NCCL has not aborted them after ABORT_S seconds, the system ends the process EXIT_S seconds later. The
        process groups can't be used afterwards.
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
        """Free all CUDA graphs that may hold collectives, even if other objects still refer to them."""
        for graph in self.graphs:
            graph.reset()


def _abort(groups: list[dist.ProcessGroup]) -> None:
    """Abort NCCL's communicators all at once, since one may wait for the kernel of another."""
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
    """Have the system kill this process after some seconds: if it hangs in a library at exit, no Python runs then."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)
