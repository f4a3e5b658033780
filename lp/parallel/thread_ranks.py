"""Ranks as threads of one process instead of processes: for projections, dry runs and tests on one machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lp.config import DEFAULT_TIMEOUT_S
from lp.errors import CallsDiffer
from lp.parallel.context import ENDED, ParallelContext, T
from lp.parallel.lost_ranks import differing
from lp.parallel.rank_group import RankGroup


class Lockstep:
    """The meeting point of ranks that are threads of one process: it exchanges tensors among them.

    Args:
        world_size: number of ranks.

    Attributes:
        barrier: barrier at which all ranks wait for each other.
        given: what each rank is doing, and the tensor that the rank gave last; one entry per rank.
    """

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.given: list[tuple[str, torch.Tensor]] = [(ENDED, torch.zeros(0))] * world_size

    def trade(
        self, rank: int, call: str, mine: torch.Tensor, timeout_s: float | None
    ) -> list[tuple[str, torch.Tensor]]:
        """Exchange tensors: give this rank's tensor, wait for all ranks, and get copies of all tensors.

        Args:
            rank: number of this rank.
            call: what this rank is doing, for error messages.
            mine: this rank's tensor.
            timeout_s: seconds to wait for the other ranks; None: without a limit.

        Returns:
            For each rank, what it is doing and a copy of its tensor.

        Raises:
            threading.BrokenBarrierError: another rank has failed, or did not come in time.
        """
        self.given[rank] = call, mine
        self.barrier.wait(timeout_s)
        everyone = [(call, tensor.clone()) for call, tensor in self.given]
        with contextlib.suppress(threading.BrokenBarrierError):  # a rank that has all of it may fail while others leave
            self.barrier.wait(timeout_s)
        return everyone


@dataclass(frozen=True)
class LockstepGroup(RankGroup):
    """A group of ranks that are threads of this process: collectives without torch.distributed.

    Attributes:
        shared: the ranks' meeting point, the same object on every rank.
    """

    shared: Lockstep = field(default_factory=lambda: Lockstep(1))

    def all_gather(self, message: torch.Tensor) -> torch.Tensor:
        return torch.stack([each.cpu() for each in self._trade("in a step of generate", message)])

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor.copy_(self._trade("in a broadcast", tensor)[source])

    def gather_message(self, call: str, message: torch.Tensor, patient: bool) -> torch.Tensor:
        return torch.stack(self._trade(call, message))

    def end(self) -> None:
        """Wait until all ranks have ended; until then, answer their collectives, so that none of them waits in vain.

        A rank calls it when its own work is done.
        """
        with contextlib.suppress(threading.BrokenBarrierError):
            while {call for call, _ in self._traded(ENDED, torch.zeros(0), None)} != {ENDED}:
                pass

    def _trade(self, call: str, mine: torch.Tensor) -> list[torch.Tensor]:
        everyone = self._traded(call, mine, DEFAULT_TIMEOUT_S)
        if len({tensor.shape for _, tensor in everyone}) > 1:
            raise CallsDiffer(differing([call for call, _ in everyone]))
        return [tensor for _, tensor in everyone]

    def _traded(self, call: str, mine: torch.Tensor, timeout_s: float | None) -> list[tuple[str, torch.Tensor]]:
        return self.shared.trade(self.rank, call, mine, timeout_s)


def run_lockstep(world_size: int, body: Callable[[ParallelContext], T]) -> list[T]:
    """Run `body(context)` for several ranks in one process, each in its own thread, and return their results.

    Args:
        world_size: number of ranks.
        body: function that is called once for each rank, with its context.

    Returns:
        The results of `body`, in the order of the ranks.

    Raises:
        BaseException: the error of the lowest rank that failed by itself, and not because another rank did.
    """
    results: list[Any] = [None] * world_size
    errors: list[tuple[bool, int, BaseException]] = []
    everyone = Lockstep(world_size)

    def run(rank: int) -> None:
        ranks = LockstepGroup(rank, world_size, shared=everyone)
        context = ParallelContext(rank, world_size, rank, ranks=ranks, steps=ranks)
        try:
            results[rank] = body(context)
            ranks.end()
        except BaseException as error:
            errors.append((_is_due_to_another(error), rank, error))
            if is_stopped_by_another(error):
                ranks.end()  # the rank that failed may still be telling others
                return
            everyone.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda found: found[:2])[2]
    return results


def _is_due_to_another(error: BaseException) -> bool:
    """Whether a rank was only released, or stopped, by the failure of another one."""
    return is_stopped_by_another(error) or isinstance(error, threading.BrokenBarrierError)


def is_stopped_by_another(error: BaseException) -> bool:
    """Whether an error is an `lp.Interrupted` that another rank caused: this rank got no signal.

    `lp.Interrupted` itself can't be imported here, since a higher layer defines it.
    """
    return isinstance(error, KeyboardInterrupt) and getattr(error, "signal", None) == 0
