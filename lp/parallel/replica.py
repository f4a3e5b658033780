"""The ranks of one replica: tensor parallelism divides the model among them. T: ranks of the replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lp.parallel import agreement
from lp.parallel.agreement import Outcome
from lp.parallel.one_shot_sum import OneShotSum
from lp.parallel.rank_group import ProcessRankGroup


@dataclass(frozen=True)
class Replica:
    """What holds one copy of the model; this base class is a rank that holds all of it.

    Its collectives are on the device of the model, in the order in which the model computes.

    Attributes:
        rank: this rank's number in the replica.
        size: T, how many ranks it has.
    """

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place or in new memory; the same bits on every rank."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, (T, *shape), all of one shape."""
        return tensor[None]

    def any_rank(self, mine: Sequence[bool], device: torch.device) -> list[bool]:
        """Tell all ranks what holds on any of them.

        Args:
            mine: whether each of several things holds on this rank; the same things on every rank.
            device: where ranks exchange tensors.
        """
        if self.size == 1:
            return list(mine)
        return self.on_host(self.all_gather(torch.tensor(mine, dtype=torch.int32, device=device)).any(0)).tolist()

    def part(self, count: int, rank: int | None = None) -> tuple[int, int]:
        """The part [first, last) of `count` things that a rank has; this one, unless another is given."""
        rank = self.rank if rank is None else rank
        return count * rank // self.size, count * (rank + 1) // self.size

    @property
    def lost(self) -> bool:
        """Whether the device may wait for a rank that is gone."""
        return False

    @property
    def started(self) -> int:
        """How many collectives this rank has started, but for those of compiled steps."""
        return 0

    def outcomes(self, call: str, mine: Outcome) -> list[Outcome]:
        """How the part of every rank in common work has ended, whatever the devices are at; arguments as there."""
        return [mine]

    def name_of(self, rank: int) -> str:
        """What error messages call a rank of the replica."""
        return str(rank)

    def abandon(self) -> None:
        """No rank computes with the others any more: end what their devices still wait for."""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for the work of the device before an event.

        Raises:
            RankLost: it waits for a rank that is gone.
        """
        event.synchronize()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's values on the host, by one wait.

        Raises:
            RankLost: as `wait_for`.
        """
        return tensor.cpu()

    def keep_track(self, graph: torch.cuda.CUDAGraph) -> None:
        """Note a graph that may hold collectives of this replica: `close` frees it, whoever still refers to it."""

    def close(self) -> None:
        """Let go of the process group, if there is one."""


@dataclass(frozen=True)
class InRankOrder(Replica):
    """A replica whose sums are taken rank after rank, so that neither a tensor's size nor the place in it changes them.

    Attributes:
        ranks: the replica that exchanges the tensors.
    """

    ranks: Replica = field(default_factory=Replica)

    @classmethod
    def of(cls, replica: Replica) -> InRankOrder:
        """Make a replica add up in the order of its ranks; one that does already is returned as it is."""
        return replica if isinstance(replica, cls) else cls(replica.rank, replica.size, replica)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks in float32 or wider, in new memory."""
        wide = torch.promote_types(tensor.dtype, torch.float32)
        parts = self.ranks.all_gather(tensor).to(wide)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.ranks.all_gather(tensor)

    @property
    def lost(self) -> bool:
        return self.ranks.lost

    @property
    def started(self) -> int:
        return self.ranks.started

    def outcomes(self, call: str, mine: Outcome) -> list[Outcome]:
        return self.ranks.outcomes(call, mine)

    def name_of(self, rank: int) -> str:
        return self.ranks.name_of(rank)

    def abandon(self) -> None:
        self.ranks.abandon()

    def wait_for(self, event: torch.cuda.Event) -> None:
        self.ranks.wait_for(event)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.ranks.on_host(tensor)

    def keep_track(self, graph: torch.cuda.CUDAGraph) -> None:
        self.ranks.keep_track(graph)

    def close(self) -> None:
        self.ranks.close()


@dataclass(frozen=True)
class ProcessReplica(Replica):
    """Ranks that are processes.

    Attributes:
        group: the ranks' group of torch.distributed.
        messages: the same ranks, for messages.
        one_shot: what sums small tensors; None where `group` sums all.
        calls: has an entry, how many collectives this rank has started, but for those of compiled steps.
    """

    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    messages: ProcessRankGroup = field(default_factory=ProcessRankGroup, repr=False, compare=False)
    one_shot: OneShotSum | None = field(default=None, repr=False, compare=False)
    calls: list[int] = field(default_factory=lambda: [0], repr=False, compare=False)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count()
        if self.one_shot and self.one_shot.takes(tensor):
            return self.one_shot(tensor)
        with self.messages.answered():
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count()
        gathered = tensor.new_empty(self.size, *tensor.shape)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        with self.messages.answered():
            gather(gathered.view(-1), tensor.contiguous().view(-1), group=self.group)
        return gathered

    def _count(self) -> None:
        if not torch.compiler.is_compiling():  # it would compile anew for every count
            self.calls[0] += 1

    @property
    def lost(self) -> bool:
        return self.messages.lost

    @property
    def started(self) -> int:
        return self.calls[0]

    def outcomes(self, call: str, mine: Outcome) -> list[Outcome]:
        return agreement.outcomes(self.messages, call, mine)

    def name_of(self, rank: int) -> str:
        return self.messages.name_of(rank)

    def abandon(self) -> None:
        self.messages.waits.abandon()

    def wait_for(self, event: torch.cuda.Event) -> None:
        self.messages.wait_for(event)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.messages.on_host(tensor)

    def keep_track(self, graph: torch.cuda.CUDAGraph) -> None:
        self.messages.waits.graphs.add(graph)

    def close(self) -> None:
        self.messages.waits.free_graphs()  # NCCL ends a group when no graph holds its collectives, and waits till then
        object.__setattr__(self, "group", None)  # models hold the replica, and the group's threads end with it
        object.__setattr__(self, "one_shot", None)
