"""Ranks as threads of one process, with the same collectives: for tests and dry runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lp.parallel.context import (
    DEFAULT_TIMEOUT_S,
    ParallelContext,
    T,
)


class _Lockstep:
    """What ranks that are threads of one process share."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.slots: list[torch.Tensor | None] = [None] * world_size


@dataclass(frozen=True)
class LockstepContext(ParallelContext):
    """A rank that is a thread: the same collectives without a process group, for tests and dry runs."""

    shared: _Lockstep = field(default_factory=lambda: _Lockstep(1))

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._trade(row)).cpu()

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor.copy_(self._trade(tensor)[source])

    def _trade(self, mine: torch.Tensor) -> list[torch.Tensor]:
        shared = self.shared
        shared.slots[self.rank] = mine
        shared.barrier.wait(DEFAULT_TIMEOUT_S)
        everyone = [slot.clone() for slot in shared.slots if slot is not None]
        shared.barrier.wait(DEFAULT_TIMEOUT_S)
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
        try:
            results[rank] = body(LockstepContext(rank=rank, world_size=world_size, local_rank=rank, shared=shared))
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
