"""CUDA graphs: work on a GPU recorded once, and replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch

from lp.errors import RankFailed, RanksParted
from lp.models.no_waiting import NoWaiting
from lp.parallel.agreement import Outcome
from lp.parallel.replica import Replica

T = TypeVar("T")
FULL = f"{torch.OutOfMemoryError.__name__}:"  # how the cause of a rank whose device is full begins
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
                rank of the replica, which the error names.
            OutOfMemoryError: the device is full, of this rank or another one of the replica.
            RankFailed: a rank failed amid the collectives of the work; every rank has this error, with its cause.
        """
        if not self.recording:
            return _Repeated(work)
        self._on_all_ranks("warming up a step", partial(self._warm_up, work), computes=True)
        return self._on_all_ranks("capturing a step", partial(self._recorded, work), computes=False)

    def _on_all_ranks(self, call: str, work: Callable[[], T], computes: bool) -> T:
        """Do what every rank of the replica does; it fails on all where it fails on one, by a word on the host.

        A step that one of them runs uncaptured is not padded, and sums other sizes. And a rank that fails amid sums
        leaves the devices of the others waiting for it: its next sum, whatever it is of, would be taken for theirs.

        Args:
            call: what it is for, the same on every rank.
            computes: the ranks' devices compute together, and do not only record.
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
