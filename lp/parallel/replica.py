"""Replica: the ranks that hold one copy of the model between them (tensor parallelism), and the model's collectives.

T: number of these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lp.parallel import agreement
from lp.parallel.agreement import Outcome
from lp.parallel.one_shot_all_reduce import OneShotSum
from lp.parallel.rank_group import ProcessRankGroup


@dataclass(frozen=True)
class Replica:
    """The ranks that hold one copy of the model between them; this base class is a single rank that holds all of it.

    Its collectives are part of the forward pass: they run on the model's device, in the order in which it computes.

    Attributes:
        rank: this rank's number in the replica.
        size: T, number of ranks in the replica.
    """

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks of the replica; every rank gets the same bits.

        The sum replaces the tensor or is in new memory: use the returned tensor.
        """
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather the tensors of all ranks, which have equal shapes: (*shape) on each rank becomes (T, *shape)."""
        return tensor[None]

    def any_rank(self, mine: Sequence[bool], device: torch.device) -> list[bool]:
        """Find out which conditions hold on at least one rank.

        Args:
            mine: whether each condition holds on this rank; every rank lists the same conditions.
            device: device of the model, on which ranks exchange tensors.

        Returns:
            For each condition, whether it holds on any rank.
        """
        if self.size == 1:
            return list(mine)
        return self.on_host(self.all_gather(torch.tensor(mine, dtype=torch.int32, device=device)).any(0)).tolist()

    def part(self, count: int, rank: int | None = None) -> tuple[int, int]:
        """Find a rank's part if `count` items, such as heads or columns, are divided among the ranks.

        Args:
            count: number of items to divide.
            rank: the rank whose part is wanted; None: this one.

        Returns:
            Index of the part's first item, and of the item after its last one.
        """
        rank = self.rank if rank is None else rank
        return count * rank // self.size, count * (rank + 1) // self.size

    @property
    def lost(self) -> bool:
        """Whether another rank was lost, so that work on this rank's device may never end."""
        return False

    @property
    def started(self) -> int:
        """Number of collectives that this rank has started, without those in compiled code.

        Ranks compare it after a failure, as part of their `Outcome`.
        """
        return 0

    def outcomes(self, call: str, mine: Outcome) -> list[Outcome]:
        """Tell every rank how common work, such as recording CUDA graphs, has ended on each rank.

        The messages go between hosts, since GPUs may still be blocked by the work.

        Args:
            call: what the ranks are doing, for error messages; the same on every rank.
            mine: how the work has ended on this rank.

        Returns:
            One outcome for each rank, in the order of the ranks.
        """
        return [mine]

    def name_of(self, rank: int) -> str:
        """Name of a rank of the replica for error messages, such as "5 (lp 2, tp 1)".

        This is rank 5 of the job, in copy 2 of the model, with part 1 of that copy (tensor parallelism), all from 0.
        """
        return str(rank)

    def abandon(self) -> None:
        """Abort the collectives that devices still wait for after a rank has failed; no others can be started."""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait until the GPU has done all work recorded before an event.

        Raises:
            RankLost: the GPU was not done in time, as it waits for a rank; the message names the ranks that do not
                answer.
        """
        event.synchronize()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host, and wait for the copy.

        Raises:
            RankLost: the GPU was not done in time, see `wait_for`.
        """
        return tensor.cpu()

    def keep_track(self, graph: torch.cuda.CUDAGraph) -> None:
        """Register a CUDA graph that may hold collectives of this replica, so that `close` can free it."""

    def close(self) -> None:
        """Free the CUDA graphs given to `keep_track`, and drop the process group, if there are any."""


@dataclass(frozen=True)
class InRankOrder(Replica):
    """A replica (one copy of the model) whose all-reduce adds the ranks' tensors one after the other, in rank order.

    So a value's sum has the same bits in tensors of any size. The mode `exact=bitwise` needs that: NCCL's order of
    additions depends on the size of a tensor and on the value's place in it.

    Attributes:
        ranks: the replica that exchanges the tensors.
    """

    ranks: Replica = field(default_factory=Replica)

    @classmethod
    def of(cls, replica: Replica) -> InRankOrder:
        """Wrap a replica so that its all-reduce adds in rank order; one that does so already is returned as it is.

        Args:
            replica: the ranks that hold one copy of the model between them.
        """
        return replica if isinstance(replica, cls) else cls(replica.rank, replica.size, replica)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks in rank order, in float32 or wider; returns a new tensor of the same dtype."""
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
    """A replica (one copy of the model) on ranks that are processes, over a process group of torch.distributed.

    Attributes:
        group: process group for the model's collectives.
        messages: group of the same ranks for messages between hosts; it also decides what is done if a rank is lost.
        one_shot: sums small tensors faster; None: `group` sums all tensors.
        calls: list with one number: how many collectives this rank has started, without those in compiled code.
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
        object.__setattr__(self, "group", None)  # models still hold the replica, and threads end with the group
        object.__setattr__(self, "one_shot", None)
