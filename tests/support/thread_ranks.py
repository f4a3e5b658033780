"""Ranks as threads of one process that hold a model between them: `lp.parallel.thread_ranks` with replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from lp.config import DEFAULT_TIMEOUT_S
from lp.parallel import thread_ranks
from lp.parallel.context import ParallelContext, T, check_tp, coordinates
from lp.parallel.replica import Replica
from lp.parallel.thread_ranks import Lockstep, LockstepGroup, is_stopped_by_another


@dataclass(frozen=True)
class LockstepReplica(Replica):
    """The ranks of a replica as threads: sums are in rank order."""

    shared: Lockstep = field(default_factory=lambda: Lockstep(1))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        first, *others = self._trade(tensor)
        for other in others:
            first += other
        return tensor.copy_(first)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._trade(tensor))

    def _trade(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [each for _, each in self.shared.trade(self.rank, "in the model", tensor, DEFAULT_TIMEOUT_S)]


def run_lockstep(world_size: int, body: Callable[[ParallelContext], T], tp: int = 1) -> list[T]:
    """Run `body(context)` for every rank of one process, in replicas of `tp` ranks; see `lp.parallel.thread_ranks`.

    Args:
        world_size: ranks.
        body: what each of them does.
        tp: ranks of a replica.
    """
    check_tp(tp, world_size)
    columns = [Lockstep(world_size // tp) for _ in range(tp)]
    replicas = [Lockstep(tp) for _ in range(world_size // tp)]
    tensors = [Lockstep(tp) for _ in range(world_size // tp)]
    names = tuple(coordinates(rank, tp) for rank in range(world_size))

    def divided_body(context: ParallelContext) -> T:
        assert isinstance(context.ranks, LockstepGroup)
        lp_index, tp_index = divmod(context.rank, tp)
        own_names = names[lp_index * tp : (lp_index + 1) * tp]
        step_sizes = context.ranks.step_sizes
        context = replace(
            context,
            ranks=replace(context.ranks, names=names),
            steps=LockstepGroup(lp_index, world_size // tp, names[tp_index::tp], step_sizes, columns[tp_index]),
            replica=LockstepReplica(tp_index, tp, tensors[lp_index]),
            replica_ranks=LockstepGroup(tp_index, tp, own_names, step_sizes, replicas[lp_index]),
        )
        try:
            return body(context)
        except BaseException as error:
            if not is_stopped_by_another(error):
                for each in (*columns, *replicas, *tensors):
                    each.barrier.abort()
            raise

    return thread_ranks.run_lockstep(world_size, divided_body if tp > 1 else body)
