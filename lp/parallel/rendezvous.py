"""How ranks that are processes meet: their devices, their process group, and how they leave it."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lp.errors import UserError


def join(backend: str, device: torch.device, rank: int, world_size: int, timeout_s: float) -> str:
    """Meet the other ranks, unless that is done.

    Returns:
        What carries collectives.

    Raises:
        ValueError: the address cannot be used, ranks did not come in time, or a backend that is not available.
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
    """Leave the process group, if there is one, for good: a process that joined again would wait for ever.

    A group's threads end with the last reference to it. One that still runs when Python ends may abort the process.
    Models and their captured steps refer to each other: those that nobody has any more go first, since NCCL waits for
    graphs that hold its collectives.

    Args:
        lost: the device may wait for a rank that is gone, and ending a group may wait for the device: none is ended.
    """
    if dist.is_initialized() and not lost:
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def local_device(device: str | torch.device, local_rank: int) -> torch.device:
    """The device by this name; "cuda" and "auto" give each rank of a node its own GPU, in turn.

    Raises:
        ValueError: torch cannot compute there.
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
    """Names a GPU among all that ranks may have; empty for a CPU.

    Its number does not: a launcher may show every process one GPU, and each calls it cuda:0.
    """
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that this rank cannot use, whatever the others have.

    Raises:
        ValueError: no such backend, or nccl without a GPU.
    """
    if backend not in ("auto", "nccl", "gloo"):
        raise UserError(f"backend is {backend!r}; it must be 'auto', 'nccl' or 'gloo'")
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise UserError("backend is 'nccl' but this rank has no GPU or torch no NCCL; use backend=gloo")


def choose_backend(backend: str, devices: Sequence[str]) -> str:
    """What carries collectives; "auto" is nccl where every rank has a GPU of its own.

    Args:
        backend: checked.
        devices: every rank's device, as `device_id` names it.

    Raises:
        ValueError: nccl for ranks that share GPUs.
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
    """How long collectives of these groups that begin from now on may wait."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
