"""How the processes of a job meet at the start, choose devices and a backend, and leave at the end."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lp.errors import UserError


def join(backend: str, device: torch.device, rank: int, world_size: int, timeout_s: float) -> str:
    """Meet the other processes of the job, and make torch's default process group.

    If the process group exists already, the program that made it has chosen the backend, and nothing is done.

    Args:
        backend: "nccl", "gloo", or "auto": nccl if every rank has a GPU of its own, else gloo.
        device: device of this rank.
        rank: number of this rank, 0 to world_size - 1.
        world_size: number of ranks of the job.
        timeout_s: seconds to wait for the other ranks, and the time-out of the group's collectives.

    Returns:
        The backend of the process group: "nccl" or "gloo".

    Raises:
        ValueError: MASTER_ADDR and MASTER_PORT can't be used, the other ranks did not come in time, or the backend is
            not available.
    """
    check_backend(backend, device)
    if dist.is_initialized():
        return dist.get_backend()
    timeout = timedelta(seconds=timeout_s)
    devices: list[str] = []
    try:
        store, *_ = next(iter(dist.rendezvous("env://", rank, world_size, timeout=timeout)))
        # torchrun keeps its store when it starts ranks again: they must not find the addresses of those before them.
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        store.set(f"lp/device/{rank}", device_id(device))
        devices = [store.get(f"lp/device/{other}").decode() for other in range(world_size)]
        chosen = choose_backend(backend, devices)
        dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except UserError:
        raise
    except (dist.DistError, RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"rank {rank} of {world_size} cannot join the others at {where} within {timeout_s:g} s ({reason}); start "
            "every rank, with a free MASTER_PORT and an address that all reach, or give parallel.timeout_s=..."
        ) from error
    return chosen


def leave(lost: bool = False) -> None:
    """Destroy the process groups, if there are any, before the process ends; the process can't join again.

    The threads of a group must have ended when Python ends, or they may abort the process; so garbage is collected
    before and after the groups are destroyed. Before, because NCCL waits until all CUDA graphs with its collectives are
    freed, and unused models may still hold such graphs in reference cycles.

    Args:
        lost: whether a rank was lost. Then nothing is destroyed, since that could wait for a GPU that waits for the
            lost rank.
    """
    if dist.is_initialized() and not lost:
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def local_device(device: str | torch.device, local_rank: int) -> torch.device:
    """Choose the device of a rank; ranks of a node take its GPUs in turn.

    Args:
        device: "auto" (a GPU if there is one, else the CPU), "cuda" (one of the node's GPUs), the name of a device such
            as "cpu" or "cuda:1", or a torch.device, which is returned as it is.
        local_rank: number of the rank among those on its node, from 0.

    Raises:
        ValueError: torch can't compute on this device.
    """
    if isinstance(device, torch.device):
        return device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device is 'cuda' but torch sees no GPU; use device=cpu or a CUDA build of torch")
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # no such device, a build without it, or one that holds no values
        reason = str(error).split("\n")[0]
        raise UserError(f"torch cannot compute on device {device!r} ({reason}); use device=cpu or auto") from error
    return torch.device(device)


def device_id(device: torch.device) -> str:
    """The UUID of a GPU, by which ranks see whether they share a GPU; empty for a CPU.

    The index of a GPU would not do: a launcher may show every process a single GPU, and each process calls it cuda:0.
    """
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def check_backend(backend: str, device: torch.device) -> None:
    """Raise an error if a backend that the user named does not exist, or can't work on this rank's device.

    Args:
        backend: "auto", "nccl" or "gloo".
        device: device of this rank.

    Raises:
        ValueError: `backend` is none of the three; or it is "nccl", but this rank has no GPU or torch has no NCCL.
    """
    if backend not in ("auto", "nccl", "gloo"):
        raise UserError(f"backend is {backend!r}; it must be 'auto', 'nccl' or 'gloo'")
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise UserError("backend is 'nccl' but this rank has no GPU or torch no NCCL; use backend=gloo")


def choose_backend(backend: str, devices: Sequence[str]) -> str:
    """Choose the backend of collectives by the devices of all ranks.

    Args:
        backend: "nccl", "gloo", or "auto": nccl if every rank has a GPU of its own, else gloo.
        devices: `device_id` of every rank's device.

    Returns:
        "nccl" or "gloo".

    Raises:
        ValueError: "nccl" was asked for, but ranks share GPUs.
    """
    gpus = len({*devices} - {""})
    alone = gpus == len(devices)
    if backend == "auto":
        return "nccl" if alone and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and not alone:
        ranks = len(devices)
        raise UserError(
            f"backend is 'nccl' but {ranks} ranks share {gpus} GPUs; start {gpus} ranks or use backend=gloo"
        )
    return backend


def set_timeout(seconds: float, *groups: dist.ProcessGroup) -> None:
    """Set how many seconds collectives may wait for other ranks, from now on.

    Args:
        seconds: the time limit.
        groups: process groups whose collectives it holds for.
    """
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
