"""Ranks as threads of one process, with the same collectives: for tests and dry runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lp.parallel import agreement
from lp.parallel.context import DEFAULT_TIMEOUT_S, ENDED, ParallelContext, T


class _Lockstep:
    """What ranks that are threads of one process share: what each gives, and the call that it gives it to."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.given: list[tuple[str, torch.Tensor]] = [(ENDED, torch.zeros(0))] * world_size


@dataclass(frozen=True)
class LockstepContext(ParallelContext):
    """A rank that is a thread: the same collectives without a process group, for tests and dry runs."""

    shared: _Lockstep = field(default_factory=lambda: _Lockstep(1))

    def all_gather(self, message: torch.Tensor) -> torch.Tensor:
        return torch.stack([each.cpu() for each in self._trade("in a step of generate", message)])

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor.copy_(self._trade("in a broadcast", tensor)[source])

    def gather_message(self, call: str, message: torch.Tensor, patient: bool) -> torch.Tensor:
        return torch.stack(self._trade(call, message))

    def end(self) -> None:
        """Stay until the last rank has ended: others may still ask for this one."""
        with contextlib.suppress(threading.BrokenBarrierError):
            while {call for call, _ in self._traded(ENDED, torch.zeros(0), None)} != {ENDED}:
                pass

    def _trade(self, call: str, mine: torch.Tensor) -> list[torch.Tensor]:
        everyone = self._traded(call, mine, DEFAULT_TIMEOUT_S)
        if len({tensor.shape for _, tensor in everyone}) > 1:
            raise agreement.CallsDiffer(agreement.differing([call for call, _ in everyone]))
        return [tensor for _, tensor in everyone]

    def _traded(self, call: str, mine: torch.Tensor, timeout_s: float | None) -> list[tuple[str, torch.Tensor]]:
        shared = self.shared
        shared.given[self.rank] = call, mine
        shared.barrier.wait(timeout_s)
        everyone = [(call, tensor.clone()) for call, tensor in shared.given]
        shared.barrier.wait(timeout_s)
        return everyone


def run_lockstep(world_size: int, body: Callable[[ParallelContext], T]) -> list[T]:
    """Run `body(context)` for every rank of one process, each in a thread, and return their results by rank.

    Raises:
        Exception: what the first failing rank raised; the others are released.
    """
    shared = _Lockstep(world_size)
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        context = LockstepContext(rank=rank, world_size=world_size, local_rank=rank, shared=shared)
        try:
            results[rank] = body(context)
            context.end()
        except threading.BrokenBarrierError as error:
            errors.append((world_size + rank, error))  # only released by another's failure: report that one
        except BaseException as error:
            errors.append((rank, error))
            shared.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda pair: pair[0])[1]
    return results
