"""CUDA graphs: work on a GPU recorded once, and replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from lp.models.no_waiting import NoWaiting
from lp.parallel.replica import Replica

T = TypeVar("T")
WARM_UPS = 2  # runs before a capture, in which libraries allocate their workspaces


class CaptureFailed(RuntimeError):
    """The work can't be recorded."""


class GraphRecorder:
    """Records work of one device, in one stream; its graphs share one memory pool, since they never run at once.

    What a graph returns is overwritten when it is replayed again, or when another graph of the recorder is.

    Args:
        device: device that the work runs on.
        recording: False: work runs as it is, as it must without a GPU.
        replica: ranks that record the same work at the same time; None: this one alone.
        compiled: torch.compile has refused work that waits for the device.
    """

    def __init__(
        self, device: torch.device, recording: bool, replica: Replica | None = None, compiled: bool = False
    ) -> None:
        self.device = device
        self.recording = recording
        self._compiled = compiled
        self._replica = replica or Replica()
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def record(self, work: Callable[[], T]) -> Callable[[], T]:
        """What runs the work, and returns what it returned, in the same memory each time.

        Args:
            work: reads what it needs from memory that stays where it is.

        Raises:
            CaptureFailed: it waits for the device, or does something else that no graph takes; or it failed on another
                rank of the replica.
            OutOfMemoryError: the device is full.
        """
        if not self.recording:
            return _Repeated(work)
        try:
            recorded = self._recorded(work)
        except Exception as error:  # a model may do anything that no graph takes
            self._on_all_ranks(False)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise CaptureFailed(str(error).strip() or type(error).__name__) from error
        if not self._on_all_ranks(True):
            raise CaptureFailed("another rank of the replica can't capture it")
        return recorded

    def _on_all_ranks(self, is_recorded: bool) -> bool:
        """Whether all ranks did: a step that one of them runs uncaptured is not padded, and sums other sizes."""
        if self._replica.size == 1:
            return is_recorded
        missing = torch.tensor([not is_recorded], dtype=torch.int64).to(self.device)
        return not self._replica.on_host(self._replica.all_reduce(missing)).item()

    def _recorded(self, work: Callable[[], T]) -> Callable[[], T]:
        # A capture that fails leaves its stream the current one: the outer block makes it what it was.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream()):
            if self._stream is None:  # torch's own stream for captures may be of another device
                self._stream = torch.cuda.Stream()
                self._pool = torch.cuda.graph_pool_handle()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS - 1):
                    work()
                # Waiting that is found in a capture leaves torch's allocator in the capture.
                with nullcontext() if self._compiled else NoWaiting():
                    work()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            self._replica.keep_track(graph)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = work()
        return partial(_replay, graph, result, work)


class _Repeated(Generic[T]):
    """Work that is done again each time; a tensor that it returns lies in the memory of the first one, as a graph's."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: T | None = None

    def __call__(self) -> T:
        result = self._work()
        if isinstance(self._result, torch.Tensor) and isinstance(result, torch.Tensor):
            self._result.copy_(result)
        else:
            self._result = result
        return self._result


def _replay(graph: torch.cuda.CUDAGraph, result: T, work: Callable[[], T]) -> T:
    """Replay a graph; what `work` refers to is the memory that it reads, which must live as long."""
    graph.replay()
    return result
