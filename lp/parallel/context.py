"""ParallelContext: who this rank is, and which ranks it works with.

The same code serves one rank and many: with one rank every collective is the identity. A replica is a copy of the
model, on one rank or divided among T ranks by tensor parallelism. The ranks of a job form two kinds of groups: those
that hold one replica between them ("tp"), and those that share decode steps, one rank of each replica ("lp").
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lp.checks import check_int, check_real, env_int
from lp.config import DEFAULT_SETUP_TIMEOUT_S, DEFAULT_TIMEOUT_S
from lp.errors import UserError
from lp.parallel import agreement
from lp.parallel.device_waits import DeviceWaits
from lp.parallel.one_shot_all_reduce import one_shot_sum
from lp.parallel.rank_group import ProcessRankGroup, RankGroup
from lp.parallel.rendezvous import join, leave, local_device
from lp.parallel.replica import ProcessReplica, Replica

T = TypeVar("T")
ENDED = "done with all calls"
WORD = 8  # bytes of a text that one int64 carries


@dataclass(frozen=True)
class ParallelContext:
    """What this process has to know about the ranks of its job: its own number, its device and its groups of ranks.

    `from_env` makes it under torchrun; by default it is a single rank. A replica is a copy of the model, on one rank or
    divided among several by tensor parallelism.

    Attributes:
        rank, world_size, local_rank: torchrun's RANK, WORLD_SIZE and LOCAL_RANK.
        device: device on which this rank computes.
        backend: "nccl", "gloo", or "none" for a single rank.
        mesh: DeviceMesh with dimensions ("lp", "tp"); None for a single rank.
        ranks: all ranks that make the same calls as this one.
        steps: the ranks that share decode steps with this one, one rank of each replica.
        replica: the ranks that hold one replica together with this one, for the model's own collectives.
        replica_ranks: the ranks of `replica`, for messages between hosts.
        timeouts: seconds that a collective may wait for other ranks: (usually, within `setting_up`).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    mesh: DeviceMesh | None = field(default=None, compare=False)
    ranks: RankGroup = field(default_factory=RankGroup)
    steps: RankGroup = field(default_factory=RankGroup)
    replica: Replica = field(default_factory=Replica)
    replica_ranks: RankGroup = field(default_factory=RankGroup)
    timeouts: tuple[float, float] = (DEFAULT_TIMEOUT_S, DEFAULT_SETUP_TIMEOUT_S)

    @classmethod
    def single(cls, device: str | torch.device = "auto") -> ParallelContext:
        """Make the context of a process that decodes by itself, on a device such as "cpu", "cuda:0" or "auto"."""
        return cls(device=local_device(device, 0))

    @classmethod
    def from_env(
        cls,
        backend: str = "auto",
        device: str = "auto",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        setup_timeout_s: float = DEFAULT_SETUP_TIMEOUT_S,
        tp: int = 1,
        one_shot_sums: bool = False,
    ) -> ParallelContext:
        """Meet the other ranks that torchrun started, and make this rank's context; without torchrun, a single rank's.

        Args:
            backend: "nccl", "gloo", or "auto": nccl if every rank has a GPU of its own, else gloo.
            device: "cpu", "cuda", or "auto": cuda if there is a GPU, else cpu. With "cuda", ranks of a node take its
                GPUs in turn, and share them if there are too few.
            timeout_s: seconds that a collective may wait for other ranks before it raises an error.
            setup_timeout_s: seconds that a collective may wait within `setting_up`; raised to `timeout_s` if lower.
            tp: T, number of ranks that hold one copy of the model between them: rank = lp index * T + tp index.
            one_shot_sums: let these T ranks sum small tensors by one kernel over torch's symmetric memory. If its sums
                differ from NCCL's by more than rounding, or it is not available, a warning says so, and NCCL sums them.

        Raises:
            ValueError: a variable of torchrun's environment is missing, the backend or device is not available, the
                other ranks did not come in time, or T does not divide the number of ranks.
        """
        timeout_s, setup_timeout_s = check_timeouts(timeout_s, setup_timeout_s)
        setup_timeout_s = max(timeout_s, setup_timeout_s)
        world_size = env_int("WORLD_SIZE", 1, low=1)
        check_tp(tp, world_size)
        if world_size == 1:
            return cls.single(device)
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UserError(f"WORLD_SIZE is {world_size} but {', '.join(missing)} is not set; launch with torchrun")
        rank, local_rank = env_int("RANK", 0, high=world_size - 1), env_int("LOCAL_RANK", 0)
        where = local_device(device, local_rank)
        if where.type == "cuda":
            torch.cuda.set_device(where)
        backend = join(backend, where, rank, world_size, timeout_s)
        context = cls(rank, world_size, local_rank, where, backend, timeouts=(timeout_s, setup_timeout_s))
        return context._with_groups(tp, one_shot_sums)

    def _with_groups(self, tp: int, one_shot_sums: bool) -> ParallelContext:
        """Make the groups of this rank, after the processes of the job have met; all ranks call it together."""
        replicas = self.world_size // tp
        lp_index, tp_index = divmod(self.rank, tp)
        kind = "cpu" if self.backend == "gloo" else "cuda"
        mesh = init_device_mesh(kind, (replicas, tp), mesh_dim_names=("lp", "tp"))
        timeout = timedelta(seconds=self.timeouts[0])
        names = tuple(coordinates(rank, tp) for rank in range(self.world_size)) if tp > 1 else ()
        step_sizes: list[int] = []
        waits = DeviceWaits(self.timeouts[0])

        def group_of(rank: int, size: int, names: tuple[str, ...], steps: Any, messages: Any) -> RankGroup:
            if size == 1:
                return RankGroup(names=names, step_sizes=step_sizes)
            home = self.rank, self.world_size
            if self.backend == "nccl":
                waits.groups.append(steps)
            shared = self.device, self.backend, steps, messages, home, waits
            group = ProcessRankGroup(rank, size, names, step_sizes, *shared)
            group.set_timeout(self.timeouts[0])
            return group

        everyone = dist.new_group(backend="gloo", timeout=timeout)
        if tp == 1:
            ranks = group_of(self.rank, self.world_size, names, mesh.get_group("lp"), everyone)
            return replace(self, mesh=mesh, ranks=ranks, steps=ranks)
        grid = [[lp * tp + each for each in range(tp)] for lp in range(replicas)]
        columns = [[*column] for column in zip(*grid, strict=True)]
        across = dist.new_subgroups_by_enumeration(columns, timeout, backend="gloo")[0]
        within = dist.new_subgroups_by_enumeration(grid, timeout, backend="gloo")[0]
        assert dist.group.WORLD is not None
        own_names = names[lp_index * tp : (lp_index + 1) * tp]
        ranks = group_of(self.rank, self.world_size, names, dist.group.WORLD, everyone)
        replica_ranks = group_of(tp_index, tp, own_names, mesh.get_group("tp"), within)
        assert isinstance(replica_ranks, ProcessRankGroup)
        one_shot = one_shot_sum(mesh.get_group("tp"), self.device) if one_shot_sums else None
        return replace(
            self,
            mesh=mesh,
            ranks=ranks,
            steps=group_of(lp_index, replicas, names[tp_index::tp], mesh.get_group("lp"), across),
            replica=ProcessReplica(tp_index, tp, mesh.get_group("tp"), replica_ranks, one_shot),
            replica_ranks=replica_ranks,
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone prints and writes files."""
        return self.ranks.rank == 0

    @property
    def alone(self) -> bool:
        """Whether this rank decodes by itself: it has a whole copy of the model, and shares its steps with no rank."""
        return self.steps.size == 1 and self.replica.size == 1

    def replica_alone(self) -> ParallelContext:
        """Make a context in which the ranks with this copy of the model decode by themselves.

        They share no steps with other copies of the model.
        """
        ranks = self.replica_ranks
        own_name = (ranks.name_of(ranks.rank),) if ranks.names else ()
        steps = RankGroup(names=own_name, step_sizes=ranks.step_sizes)
        return replace(self, mesh=None, ranks=ranks, steps=steps)

    @contextlib.contextmanager
    def setting_up(self, call: str = "setting up") -> Iterator[None]:
        """A `with` block in which ranks wait longer for each other, since one may compile or capture for minutes.

        All ranks enter and leave the block together, outside of generation. Blocks must not be nested.

        Args:
            call: what the block is for, for error messages; the same on every rank.

        Raises:
            CallsDiffer: another rank is doing something else.
            RankLost: a rank did not reach the end of the block within `setup_timeout_s`.
        """
        groups = self.ranks, self.steps, self.replica_ranks
        usual, longer = self.timeouts
        for group in groups:
            group.set_timeout(longer)
        try:
            yield
            agreement.exchange(self.ranks, call)  # else the first to leave would have the usual time-out again
        finally:
            for group in groups:
                group.set_timeout(usual)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host, and wait for the copy; an error ends the wait if the device hangs on a lost rank.

        Raises:
            RankLost: the device was not done in time, since it waits for a rank that is gone.
        """
        ranks = self.steps if self.steps.size > 1 else self.replica
        return ranks.on_host(tensor)

    def share_text(self, text: str | None, call: str = "sharing a text") -> str | None:
        """Send rank 0's string to every rank; they wait for it without a time limit, as for what a person types.

        Args:
            text: the string on rank 0, or None; on other ranks it is ignored.
            call: what the string is for, for error messages; the same on every rank.

        Returns:
            Rank 0's string or None, on every rank.

        Raises:
            CallsDiffer: another rank is doing something else.
        """
        data = None if text is None else text.encode("utf-8", "surrogatepass")
        words = [-1 if data is None else len(data)]
        length = int(agreement.exchange(self.ranks, call, words, patient=True)[0])
        if length < 0:
            return None
        body = torch.zeros(-(-length // WORD), dtype=torch.int64)
        if self.is_main and data:
            body = torch.frombuffer(bytearray(data + bytes(-length % WORD)), dtype=torch.int64)
        shared = self.ranks.broadcast_body(body) if length else body
        return shared.cpu().numpy().tobytes()[:length].decode("utf-8", "surrogatepass")

    def share_numbers(self, numbers: Sequence[int] | None, call: str) -> list[int] | None:
        """Send rank 0's numbers to every rank.

        Args:
            numbers: int64 numbers on rank 0, or None; on other ranks they are ignored.
            call: what the numbers are for, for error messages; the same on every rank.

        Returns:
            Rank 0's numbers or None, on every rank.

        Raises:
            CallsDiffer: another rank is doing something else.
        """
        words = [-1 if numbers is None else len(numbers)]
        length = int(agreement.exchange(self.ranks, call, words)[0])
        if length < 0:
            return None
        body = torch.tensor(numbers if self.is_main else [0] * length, dtype=torch.int64)
        return (self.ranks.broadcast_body(body) if length else body).tolist()

    def close(self) -> None:
        """Leave the process groups, if there are any; the context can't be used afterwards."""
        for part in (self.ranks, self.steps, self.replica_ranks, self.replica):
            part.close()
        if self.mesh is not None:
            object.__setattr__(self, "mesh", None)
            leave(self.ranks.lost)


def check_timeouts(timeout_s: float, setup_timeout_s: float = DEFAULT_SETUP_TIMEOUT_S) -> tuple[float, float]:
    """Check the time-outs of `ParallelContext.from_env`, and return them as floats.

    Args:
        timeout_s, setup_timeout_s: seconds that collectives may wait, usually and while setting up.

    Raises:
        ValueError: one of them is not in [1, 86400].
    """
    return (
        check_real("timeout_s", timeout_s, 1, 86400, f"try {DEFAULT_TIMEOUT_S:g} (seconds)"),
        check_real("setup_timeout_s", setup_timeout_s, 1, 86400, f"try {DEFAULT_SETUP_TIMEOUT_S:g}"),
    )


def check_tp(tp: int, world_size: int) -> None:
    """Raise an error if the ranks of a job cannot be divided into groups of `tp` ranks, for tensor parallelism.

    Args:
        tp: T, number of ranks that hold one copy of the model between them.
        world_size: number of ranks of the job.

    Raises:
        ValueError: `tp` does not divide `world_size`; the message lists the numbers that do.
    """
    check_int("tp", tp, 1, math.inf, "1 holds the whole model on every rank")
    if world_size % tp:
        fitting = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
        raise UserError(
            f"tp is {tp}, but {world_size} ranks cannot be divided into replicas of {tp}; give parallel.tp one of "
            f"{', '.join(fitting)}, or start a multiple of {tp} ranks"
        )


def coordinates(rank: int, tp: int) -> str:
    """Name of a rank for error messages, such as "5 (lp 2, tp 1)".

    This is rank 5 of the job, in copy 2 of the model, with part 1 of that copy (tensor parallelism), all from 0.

    Args:
        rank: number of the rank in the job.
        tp: number of ranks that hold one copy of the model between them.
    """
    return f"{rank} (lp {rank // tp}, tp {rank % tp})"
