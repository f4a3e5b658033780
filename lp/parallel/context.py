"""ParallelContext: who this rank is and how it talks to the others.

One path for 1..N ranks: with one rank every collective is the identity. The mesh has named dimensions, `lp`
(ranks that share one step) and `tp` (ranks that hold one replica of the model between them).
R: ranks, P: int64s a rank sends.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lp.checks import check_int, check_real, env_int
from lp.config import DEFAULT_SETUP_TIMEOUT_S, DEFAULT_TIMEOUT_S
from lp.errors import RankLost, UserError
from lp.parallel import agreement
from lp.parallel.lost_ranks import announce, roll_call
from lp.parallel.one_shot_sum import one_shot_sum
from lp.parallel.rendezvous import join, leave, local_device, set_timeout
from lp.parallel.replica import ProcessReplica, Replica

T = TypeVar("T")
PATIENCE = timedelta(days=365)
ENDED = "done with all calls"


@dataclass(frozen=True)
class ParallelContext:
    """One rank among the ranks of a job; this base class is the single rank.

    Attributes:
        rank, world_size, local_rank: what torchrun calls so.
        device: where this rank computes.
        backend: "nccl", "gloo", or "none" for a single rank.
        mesh: DeviceMesh with dimensions ("lp", "tp"), None for a single rank.
        step_sizes: int64s of a step's message, of the generations that are under way on this rank, the innermost last.
        replica: the ranks that hold a replica of the model with this one; itself alone without tp.
        dimensions: the ranks along a dimension of the mesh, where there is more than one: "lp", those that share steps
            with this one; "tp", those of its replica, which is by itself there.
        names: what messages call the ranks; empty: their numbers.
        leads: whether this rank's results count for all, where that is not rank 0 of these ranks.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    mesh: DeviceMesh | None = None
    step_sizes: list[int] = field(default_factory=list, repr=False, compare=False)
    replica: Replica = field(default_factory=Replica)
    dimensions: dict[str, ParallelContext] = field(default_factory=dict, repr=False, compare=False)
    names: tuple[str, ...] = ()
    leads: bool | None = None

    @classmethod
    def single(cls, device: str | torch.device = "auto") -> ParallelContext:
        """The context of one process by itself."""
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
        """The context torchrun describes in the environment; a single rank where there is none.

        Args:
            backend: "auto" is nccl when every rank has a GPU of its own, else gloo.
            device: "auto" is this rank's GPU if there is one; "cuda" lets ranks share GPUs, in turn.
            timeout_s: seconds a collective may wait before it is an error.
            setup_timeout_s: the same within `setting_up`; at least timeout_s.
            tp: T, ranks that hold one replica of the model between them: rank = lp index * T + tp index.
            one_shot_sums: sum small tensors of a replica by torch's symmetric memory, where it gives NCCL's sums.

        Raises:
            ValueError: an incomplete environment, a backend that is not available, or ranks that T does not divide.
        """
        timeout_s, setup_timeout_s = check_timeouts(timeout_s, setup_timeout_s)
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
        shape = world_size // tp, tp
        mesh = init_device_mesh("cpu" if backend == "gloo" else "cuda", shape, mesh_dim_names=("lp", "tp"))
        messages = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        timeouts = timeout_s, max(timeout_s, setup_timeout_s)
        world = _ProcessContext(
            rank, world_size, local_rank, where, backend, mesh, messages=messages, timeouts=timeouts
        )
        return world if tp == 1 else world.divided(one_shot_sums)

    @property
    def is_main(self) -> bool:
        """Rank 0 alone prints and writes."""
        return self.rank == 0 if self.leads is None else self.leads

    @property
    def alone(self) -> bool:
        """Whether no other rank has a part in what this one decodes."""
        return self.world_size == 1 and self.replica.size == 1

    @property
    def lp(self) -> ParallelContext:
        """The ranks that share steps, one of each replica: all of them without tp."""
        return self.dimensions.get("lp", self)

    @property
    def tp(self) -> ParallelContext:
        """The ranks of this one's replica, without the others."""
        return self.dimensions.get("tp") or ParallelContext(device=self.device)

    def name_of(self, rank: int) -> str:
        """What messages call a rank."""
        return self.names[rank] if self.names else str(rank)

    def all_gather(self, message: torch.Tensor) -> torch.Tensor:
        """Every rank's int64 message: (P,) on each rank -> (R, P), on the host."""
        return message[None].cpu()

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The source rank's tensor, in place on the others."""
        return tensor

    @contextlib.contextmanager
    def stepping(self, size: int) -> Iterator[None]:
        """While steps send `size` int64s, all messages come in pieces of that size: other ranks may be in a step."""
        self.step_sizes.append(size)
        try:
            yield
        finally:
            self.step_sizes.pop()

    @contextlib.contextmanager
    def setting_up(self, call: str = "setting up") -> Iterator[None]:
        """Ranks wait for each other longer within it: for what takes minutes on one of them, as compiling or capturing.

        All ranks enter it, outside of generations, and leave it together: the first step has its own, shorter time-out.
        It is not for use within itself.

        Args:
            call: what it is for, the same on every rank.

        Raises:
            CallsDiffer: another rank is in another call.
            RankLost: a rank did not come to its end in `setup_timeout_s`.
        """
        yield

    def gather_message(self, call: str, message: torch.Tensor, patient: bool) -> torch.Tensor:
        """Every rank's message of `lp.parallel.agreement`, which between generations are all of one size.

        Args:
            call: what this rank is doing.
            message: (agreement.SIZE,) int64, on the host.
            patient: wait for rank 0 however long it takes.

        Returns:
            (R, agreement.SIZE), on the host.
        """
        return self.all_gather(message)

    def share_text(self, text: str | None, call: str = "sharing a text") -> str | None:
        """Rank 0's text, or None, on every rank; ranks wait for it as long as a person takes to type.

        Args:
            text: rank 0's text; the others' is not looked at.
            call: what it is for, the same on every rank.

        Raises:
            CallsDiffer: another rank is in another call.
        """
        data = [] if text is None else list(text.encode("utf-8", "surrogatepass"))
        length = int(agreement.exchange(self, call, [-1 if text is None else len(data)], patient=True)[0])
        if length <= 0:
            return "" if length == 0 else None
        body = torch.tensor(data if self.is_main else [0] * length)
        return bytes(self._from_main(body).tolist()).decode("utf-8", "surrogatepass")

    def _from_main(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, of a size that all know, on the host."""
        return self.broadcast(tensor, 0)

    def close(self) -> None:
        """Leave the process group, if there is one."""


@dataclass(frozen=True)
class _ProcessContext(ParallelContext):
    """Ranks that are processes of a torch.distributed group.

    Attributes:
        messages: the group of messages between steps, on the host, where waiting keeps no GPU busy. A message and a
            step's message, which differ in size, would abort the process where they meet in one group.
        timeouts: seconds that a collective may wait, and within `setting_up`.
        group: group that the steps use; None: the mesh's dimension lp.
        home: rank and size of the whole job, where these ranks are a part of it.
    """

    messages: dist.ProcessGroup | None = None
    timeouts: tuple[float, float] = (DEFAULT_TIMEOUT_S, DEFAULT_SETUP_TIMEOUT_S)
    group: dist.ProcessGroup | None = None
    home: tuple[int, int] | None = None

    @property
    def _group(self) -> dist.ProcessGroup:
        if self.group is not None:
            return self.group
        assert self.mesh is not None
        return self.mesh.get_group("lp")

    def divided(self, one_shot_sums: bool) -> ParallelContext:
        """These ranks with the dimensions of the mesh, which has more than one rank a replica."""
        assert self.mesh is not None
        replicas, size = self.mesh.shape
        grid = [[lp * size + tp for tp in range(size)] for lp in range(replicas)]
        lp, tp = divmod(self.rank, size)
        timeout = timedelta(seconds=self.timeouts[0])

        def messages_of(parts: list[list[int]]) -> dist.ProcessGroup:
            own: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(parts, timeout, backend="gloo")[0]
            assert own is not None
            return own

        across, within = messages_of([[*column] for column in zip(*grid, strict=True)]), messages_of(grid)
        tp_group = self.mesh.get_group("tp")
        one_shot = one_shot_sum(tp_group, self.device) if one_shot_sums else None
        replica = ProcessReplica(tp, size, tp_group, self._answered, one_shot)
        home = self.rank, self.world_size
        names = tuple(coordinates(rank, size) for rank in range(self.world_size))
        shared: dict[str, Any] = {"step_sizes": self.step_sizes, "timeouts": self.timeouts, "home": home}
        here = self.local_rank, self.device, self.backend, None
        along_lp: ParallelContext = ParallelContext(0, 1, *here, replica=replica, names=names[tp::size], leads=tp == 0)
        if replicas > 1:
            along_lp = _ProcessContext(
                lp, replicas, *here, replica=replica, names=names[tp::size], leads=self.rank == 0,
                messages=across, group=self.mesh.get_group("lp"), **shared,
            )  # fmt: skip
        own_names = names[lp * size : (lp + 1) * size]
        by_itself = ParallelContext(0, 1, *here, replica=replica, names=own_names[tp : tp + 1], leads=tp == 0)
        along_tp = _ProcessContext(
            tp, size, *here, replica=replica, dimensions={"lp": by_itself}, names=own_names,
            messages=within, group=tp_group, **shared,
        )  # fmt: skip
        assert dist.group.WORLD is not None
        return replace(
            self, replica=replica, dimensions={"lp": along_lp, "tp": along_tp}, names=names, group=dist.group.WORLD
        )

    def all_gather(self, message: torch.Tensor) -> torch.Tensor:
        message = self._carried(message)
        gathered = message.new_empty(self.world_size, len(message))
        # torch 2.13 renames the call; older versions know the other name alone.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._answered():
            gather(gathered.view(-1), message, group=self._group)
            return gathered.cpu()

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        carried = self._carried(tensor)
        with self._answered():
            dist.broadcast(carried.view(torch.uint8), group=self._group, group_src=source)
            return tensor.copy_(carried)

    def gather_message(self, call: str, message: torch.Tensor, patient: bool) -> torch.Tensor:
        assert self.messages is not None
        gathered = [torch.empty_like(message) for _ in range(self.world_size)]
        options = dist.distributed_c10d.AllgatherOptions()
        if patient:
            options.timeout = PATIENCE
        with self._answered():
            announce(self.home[0] if self.home else self.rank, call)
            self.messages.allgather([gathered], [message], options).wait()
        return torch.stack(gathered)

    @contextlib.contextmanager
    def setting_up(self, call: str = "setting up") -> Iterator[None]:
        assert self.messages is not None
        usual, longer = self.timeouts
        set_timeout(longer, *self._groups())
        try:
            yield
            agreement.exchange(self, call)  # or the first to leave would wait for the others with the usual time-out
        finally:
            set_timeout(usual, *self._groups())

    def _groups(self) -> list[dist.ProcessGroup]:
        """Groups of these ranks, and of the ranks along the dimensions."""
        assert self.messages is not None
        parts = [each for each in self.dimensions.values() if isinstance(each, _ProcessContext)]
        return [self._group, self.messages, *(group for each in parts for group in each._groups())]

    def _from_main(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._answered():
            dist.broadcast(tensor, src=0, group=self.messages)
        return tensor

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        """The error of a collective that fails names the ranks that do not answer a roll call."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            rank, world_size = self.home or (self.rank, self.world_size)
            raise RankLost(
                f"{roll_call(rank, world_size)}, so rank {rank} stops ({reason}); see the last "
                "lines of that rank; parallel.timeout_s is how long a rank is waited for"
            ) from error

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gloo gathers on the host alone, and ranks that share a GPU have no other; NCCL on the device alone."""
        return tensor.contiguous().to("cpu" if self.backend == "gloo" else self.device)

    def close(self) -> None:
        object.__setattr__(self, "mesh", None)  # or the group's threads would go on
        object.__setattr__(self, "messages", None)
        object.__setattr__(self, "group", None)
        self.replica.close()
        for part in self.dimensions.values():
            object.__setattr__(part, "messages", None)
            object.__setattr__(part, "group", None)
        leave()


def check_timeouts(timeout_s: float, setup_timeout_s: float = DEFAULT_SETUP_TIMEOUT_S) -> tuple[float, float]:
    """Seconds that ranks wait for each other, as `ParallelContext.from_env` takes them.

    Raises:
        ValueError: one of them is not in [1, 86400].
    """
    return (
        check_real("timeout_s", timeout_s, 1, 86400, f"try {DEFAULT_TIMEOUT_S:g} (seconds)"),
        check_real("setup_timeout_s", setup_timeout_s, 1, 86400, f"try {DEFAULT_SETUP_TIMEOUT_S:g}"),
    )


def check_tp(tp: int, world_size: int) -> None:
    """Refuse replicas that the ranks cannot be divided into.

    Raises:
        ValueError: both numbers, and what would do.
    """
    check_int("tp", tp, 1, math.inf, "1 holds the whole model on every rank")
    if world_size % tp:
        fitting = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
        raise UserError(
            f"tp is {tp}, but {world_size} ranks cannot be divided into replicas of {tp}; give parallel.tp one of "
            f"{', '.join(fitting)}, or start a multiple of {tp} ranks"
        )


def coordinates(rank: int, tp: int) -> str:
    """What messages call a rank of a job with T ranks a replica."""
    return f"{rank} (lp {rank // tp}, tp {rank % tp})"
