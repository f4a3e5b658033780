"""ParallelContext: who this rank is and how it talks to the others.

One path for 1..N ranks: with one rank every collective is the identity. The mesh has named dimensions, `lp`
(ranks that share one step) and `tp` (devices that share one replica; 1 for now).
R: ranks, P: int64s a rank sends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lp.checks import check_real, env_int
from lp.config import DEFAULT_SETUP_TIMEOUT_S, DEFAULT_TIMEOUT_S
from lp.errors import RankLost, UserError
from lp.parallel import agreement
from lp.parallel.lost_ranks import announce, roll_call
from lp.parallel.rendezvous import join, leave, local_device, set_timeout

T = TypeVar("T")
PATIENCE = timedelta(days=365)
ENDED = "done with all calls"


@dataclass(frozen=True)
class ParallelContext:
    """One rank among the ranks of a job; this base class is the single rank.

    Attributes:
        rank, world_size, local_rank: as torchrun has them.
        device: where this rank computes.
        backend: "nccl", "gloo", or "none" for a single rank.
        mesh: DeviceMesh with dimensions ("lp", "tp"), None for a single rank.
        step_sizes: int64s of a step's message, of the generations that are under way on this rank, the innermost last.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    mesh: DeviceMesh | None = None
    step_sizes: list[int] = field(default_factory=list, repr=False, compare=False)

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
    ) -> ParallelContext:
        """The context torchrun describes in the environment; a single rank where there is none.

        Args:
            backend: "auto" is nccl when every rank has a GPU of its own, else gloo.
            device: "auto" is this rank's GPU if there is one; "cuda" lets ranks share GPUs, in turn.
            timeout_s: seconds a collective may wait before it is an error.
            setup_timeout_s: the same within `setting_up`; at least timeout_s.

        Raises:
            ValueError: an incomplete environment, or a backend that is not available.
        """
        timeout_s = check_real("timeout_s", timeout_s, 1, 86400, f"try {DEFAULT_TIMEOUT_S:g} (seconds)")
        setup_timeout_s = check_real("setup_timeout_s", setup_timeout_s, 1, 86400, f"try {DEFAULT_SETUP_TIMEOUT_S:g}")
        world_size = env_int("WORLD_SIZE", 1, low=1)
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
        mesh = init_device_mesh("cpu" if backend == "gloo" else "cuda", (world_size, 1), mesh_dim_names=("lp", "tp"))
        messages = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        timeouts = timeout_s, max(timeout_s, setup_timeout_s)
        return _ProcessContext(rank, world_size, local_rank, where, backend, mesh, messages=messages, timeouts=timeouts)

    @property
    def is_main(self) -> bool:
        """Rank 0 alone prints and writes."""
        return self.rank == 0

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
            text: on rank 0; the others' is not looked at.
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
    """

    messages: dist.ProcessGroup | None = None
    timeouts: tuple[float, float] = (DEFAULT_TIMEOUT_S, DEFAULT_SETUP_TIMEOUT_S)

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self.mesh is not None
        return self.mesh.get_group("lp")

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
            announce(self.rank, call)
            self.messages.allgather([gathered], [message], options).wait()
        return torch.stack(gathered)

    @contextlib.contextmanager
    def setting_up(self, call: str = "setting up") -> Iterator[None]:
        assert self.messages is not None
        usual, longer = self.timeouts
        set_timeout(longer, self._group, self.messages)
        try:
            yield
            agreement.exchange(self, call)  # or the first to leave would wait for the others with the usual time-out
        finally:
            set_timeout(usual, self._group, self.messages)

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
            raise RankLost(
                f"{roll_call(self.rank, self.world_size)}, so rank {self.rank} stops ({reason}); see the last "
                "lines of that rank; parallel.timeout_s is how long a rank is waited for"
            ) from error

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gloo gathers on the host alone, and ranks that share a GPU have no other; NCCL on the device alone."""
        return tensor.contiguous().to("cpu" if self.backend == "gloo" else self.device)

    def close(self) -> None:
        object.__setattr__(self, "mesh", None)  # or the group's threads would go on
        object.__setattr__(self, "messages", None)
        leave()
