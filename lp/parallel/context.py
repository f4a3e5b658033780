"""ParallelContext: who this rank is and how it talks to the others.

One path for 1..N ranks: with one rank every collective is the identity. The mesh has named dimensions, `lp`
(ranks that share one step) and `tp` (devices that share one replica; 1 for now).
R: ranks, P: int64s a rank sends.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lp.checks import check_real
from lp.parallel.rendezvous import RankLost, env_int, join, silent_ranks

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 120.0
PATIENCE = timedelta(days=365)


@dataclass(frozen=True)
class ParallelContext:
    """One rank's place among the ranks of a job; this base is the single rank.

    Attributes:
        rank, world_size, local_rank: as torchrun has them.
        device: where this rank computes.
        backend: "nccl", "gloo", or "none" for a single rank.
        mesh: DeviceMesh with dimensions ("lp", "tp"), None for a single rank.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    mesh: DeviceMesh | None = None

    @classmethod
    def single(cls, device: str | torch.device = "auto") -> ParallelContext:
        """The context of one process by itself."""
        return cls(device=_local_device(device, 0))

    @classmethod
    def from_env(
        cls, backend: str = "auto", device: str = "auto", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> ParallelContext:
        """The context torchrun describes in the environment; a single rank where there is none.

        Args:
            backend: "auto" is nccl when every rank of the node has a GPU of its own, else gloo.
            device: "auto" is this rank's GPU if there is one; "cuda" lets ranks share GPUs, in turn.
            timeout_s: seconds a collective may wait before it is an error.

        Raises:
            ValueError: an incomplete environment, or a backend that is not available.
        """
        timeout_s = check_real("timeout_s", timeout_s, 1, 86400, f"try {DEFAULT_TIMEOUT_S:g} (seconds)")
        world_size = env_int("WORLD_SIZE", 1, low=1)
        if world_size == 1:
            return cls.single(device)
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(f"WORLD_SIZE is {world_size} but {', '.join(missing)} is not set; launch with torchrun")
        rank, local_rank = env_int("RANK", 0, high=world_size - 1), env_int("LOCAL_RANK", 0)
        where = _local_device(device, local_rank)
        backend = _choose_backend(backend, where)
        if where.type == "cuda":
            torch.cuda.set_device(where)
        join(backend, rank, world_size, timeout_s)
        mesh = init_device_mesh("cpu" if backend == "gloo" else "cuda", (world_size, 1), mesh_dim_names=("lp", "tp"))
        return _ProcessContext(rank, world_size, local_rank, where, backend, mesh)

    @property
    def is_main(self) -> bool:
        """Rank 0 alone prints and writes."""
        return self.rank == 0

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """Every rank's int64 row: (P,) on each rank -> (R, P), on the host."""
        return row[None].cpu()

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The source rank's tensor, in place on the others."""
        return tensor

    def share_text(self, text: str | None) -> str | None:
        """Rank 0's text, or None, on every rank; ranks wait for it as long as a person takes to type.

        Args:
            text: on rank 0; the others' is not looked at.
        """
        data = [] if text is None else list(text.encode("utf-8", "surrogatepass"))
        length = int(self._wait(torch.tensor([-1 if text is None else len(data)])))
        if length <= 0:
            return "" if length == 0 else None
        body = torch.tensor(data) if self.is_main else torch.empty(length, dtype=torch.long)
        return bytes(self._wait(body).tolist()).decode("utf-8", "surrogatepass")

    def _wait(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor on the host, however long it takes."""
        return self.broadcast(tensor, 0)

    def close(self) -> None:
        """Leave the process group, if there is one."""


class _ProcessContext(ParallelContext):
    """Ranks that are processes of a torch.distributed group."""

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self.mesh is not None
        return self.mesh.get_group("lp")

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        row = self._carried(row)
        gathered = row.new_empty(self.world_size, len(row))
        # torch 2.13 renames the call; older versions know the other name alone.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._answered():
            gather(gathered.view(-1), row, group=self._group)
            return gathered.cpu()

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        carried = self._carried(tensor)
        with self._answered():
            dist.broadcast(carried.view(torch.uint8), group=self._group, group_src=source)
            return tensor.copy_(carried)

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        """A collective that fails says which ranks are to blame, as far as a roll call can tell."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            silent = silent_ranks(self.rank, self.world_size)
            who = (
                f"rank {', '.join(map(str, silent))} does not answer"
                if silent
                else "a rank came too late, or an exchange failed"
            )
            reason = str(error).strip().split("\n")[0]
            raise RankLost(
                f"{who}, so rank {self.rank} stops ({reason}); see what that rank said last; "
                "parallel.timeout_s is how long a rank is waited for"
            ) from error

    @cached_property
    def _patient(self) -> dist.ProcessGroup:
        """Without the time limit of a step, and on the host, where waiting keeps no GPU busy."""
        return dist.new_group(backend="gloo", timeout=PATIENCE)

    def _wait(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._answered():
            dist.broadcast(tensor, src=0, group=self._patient)
        return tensor

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gloo gathers on the host alone, and ranks that share a GPU have no other; NCCL on the device alone."""
        return tensor.contiguous().to("cpu" if self.backend == "gloo" else self.device)

    def close(self) -> None:
        object.__setattr__(self, "mesh", None)  # it keeps the group's threads running
        self.__dict__.pop("_patient", None)
        leave()


def leave() -> None:
    """Leave the process group, if there is one, for good: a process that joined again would wait for ever.

    A group's threads end with the last reference to it. One that still runs when Python ends may abort the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def _local_device(device: str | torch.device, local_rank: int) -> torch.device:
    if isinstance(device, torch.device):
        return device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device is 'cuda' but torch sees no GPU; use device=cpu or a CUDA build of torch")
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # no such device, a build without it, or one that holds no values
        reason = str(error).split("\n")[0]
        raise ValueError(f"torch cannot compute on device {device!r} ({reason}); use device=cpu or auto") from error
    return torch.device(device)


def _choose_backend(backend: str, device: torch.device) -> str:
    ranks, gpus = env_int("LOCAL_WORLD_SIZE", 1, low=1), torch.cuda.device_count()
    alone = ranks <= gpus
    if backend == "auto":
        return "nccl" if device.type == "cuda" and alone and dist.is_nccl_available() else "gloo"
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"backend is {backend!r}; it must be 'auto', 'nccl' or 'gloo'")
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise ValueError("backend is 'nccl' but this rank has no GPU or torch no NCCL; use backend=gloo")
    if backend == "nccl" and not alone:
        raise ValueError(f"backend is 'nccl' but {ranks} ranks share {gpus} GPUs; use NPROC={gpus} or backend=gloo")
    return backend
