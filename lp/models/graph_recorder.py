"""CUDA graphs: work on a GPU is recorded once, then replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch

from lp.errors import RankFailed, RanksParted
from lp.models.host_waits import NoWaiting
from lp.parallel.agreement import Outcome
from lp.parallel.replica import Replica

T = TypeVar("T")
FULL = f"{torch.OutOfMemoryError.__name__}:"  # how the cause of a rank whose device is full begins
WARM_UPS = 2  # runs before a capture, in which libraries allocate their workspaces


class CaptureFailed(RuntimeError):
    """The work can't be recorded as a CUDA graph; the message says why."""


class GraphRecorder:
    """Records work on one device as CUDA graphs, so that the host starts all its kernels by one launch.

    All graphs of a recorder run in one stream and share one memory pool, since they never run at once. So the result of
    a graph is overwritten when any graph of the recorder is replayed.

    Args:
        device: device that the work runs on.
        recording: whether to record; False: the work runs anew at each call, as it must without a GPU.
        replica: the ranks that record this work at the same time, since they divide the model; None: this rank alone.
        compiled: whether torch.compile has compiled the work, and so refused operations that wait for the device.
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
        """Record work as a CUDA graph, and return a function that replays it.

        Args:
            work: the function to record, without arguments; it reads its inputs from memory whose address never
                changes.

        Returns:
            A function that does the work again and returns its result, at the same place in memory each time.

        Raises:
            CaptureFailed: the work waits for the device, or does something else that no graph takes; or it failed on
                another rank of the replica, which the error names.
            OutOfMemoryError: the device of this rank, or of another rank of the replica, is full.
            RankFailed: a rank failed amid the collectives of the work; every rank has this error, with its cause.
        """
        if not self.recording:
            return _Repeated(work)
        self._on_all_ranks("warming up a step", partial(self._warm_up, work), computes=True)
        return self._on_all_ranks("capturing a step", partial(self._recorded, work), computes=False)

    def _on_all_ranks(self, call: str, work: Callable[[], T], computes: bool) -> T:
        """Do work that all ranks of the replica do at the same time; where it fails on one rank, it fails on all.

        The ranks tell each other on the host how it ended. Without that, a rank whose capture failed would run steps
        that are not padded, and its sums would have other sizes than those of the other ranks. And a rank that fails
        amid sums leaves the devices of the others waiting for it: they would take its next sum, whatever it is, for the
        missing one.

        Args:
            call: what is done, for messages, such as "capturing a step"; the same on every rank.
            work: this rank's work.
            computes: whether the ranks' devices compute together, and do not only record.
        """
        replica, error, result = self._replica, None, None
        before = replica.started
        try:
            result = work()
        except RanksParted:
            raise
        except Exception as failure:  # a model may do anything that no graph takes
            error = failure
        try:
            cause = f"{type(error).__name__}: {_first_line(error)}" if error else ""
            started = replica.started - before
            if self._compiled:  # whose collectives are not counted: all of them, or none
                started = int(not cause)
            mine = Outcome(started if computes else 0, cause)
            every = replica.outcomes(call, mine)
            failed = [rank for rank, outcome in enumerate(every) if outcome.cause]
            if not failed:
                return cast(T, result)
            first = f"rank {replica.name_of(failed[0])}"
            cause = every[failed[0]].cause
            if len({outcome.collectives for outcome in every}) > 1:
                replica.abandon()
                raise RankFailed(
                    f"{first} failed while the ranks of its replica were {call}, so all of them stop ({cause})"
                ) from error
            if isinstance(error, torch.OutOfMemoryError):
                raise error
            full = [rank for rank in failed if every[rank].cause.startswith(FULL)]
            if full:  # the same error on all ranks: they treat it alike
                raise torch.OutOfMemoryError(f"rank {replica.name_of(full[0])}: {every[full[0]].cause}") from error
            if error is None:
                raise CaptureFailed(f"{first} of the replica can't capture it: {cause}")
            raise CaptureFailed(str(error).strip() or type(error).__name__) from error
        finally:
            error = None  # raised here, it has this frame, which would keep it until gc finds the cycle

    def _warm_up(self, work: Callable[[], object]) -> None:
        """Run the work in the capture's stream, so that libraries allocate what they need."""
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream()):
            if self._stream is None:  # torch's own stream for captures may be of another device
                self._stream = torch.cuda.Stream()
                self._pool = torch.cuda.graph_pool_handle()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS - 1):
                    work()
                # Waiting that is found in a capture leaves torch's allocator in the capture.
                with nullcontext() if self._compiled else NoWaiting():  # type: ignore[no-untyped-call]
                    work()
            torch.cuda.current_stream().wait_stream(self._stream)

    def _recorded(self, work: Callable[[], T]) -> Callable[[], T]:
        # A capture that fails leaves its stream the current one: the outer block makes it what it was.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream()):
            # A capture waits for the device, without a limit.
            self._replica.wait_for(torch.cuda.current_stream().record_event())
            graph = torch.cuda.CUDAGraph()
            self._replica.keep_track(graph)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = work()
        return partial(_replay, graph, result, work)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


class _Repeated(Generic[T]):
    """Stands in for a graph and does the work anew at each call; a tensor it returns keeps its place in memory."""

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
