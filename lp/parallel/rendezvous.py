"""How ranks that are processes meet, and who is missing when one of them stops answering."""

from __future__ import annotations

import math
import os
import time
from datetime import timedelta

import torch.distributed as dist

from lp.checks import check_int

ROLL_CALL_S = 3.0  # a rank whose collective failed waits so long for the others to find out too


class RankLost(RuntimeError):
    """Another rank has ended, hangs, or came too late."""


def join(backend: str, rank: int, world_size: int, timeout_s: float) -> None:
    """Meet the other ranks, unless that is done.

    Raises:
        ValueError: the address cannot be used, or ranks did not come in time.
    """
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    try:
        store, *_ = next(iter(dist.rendezvous("env://", rank, world_size, timeout=timeout)))
        # torchrun keeps its store when it starts ranks again: they must not find the addresses of those before them.
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"rank {rank} of {world_size} cannot join the others at {where} within {timeout_s:g} s ({reason}); start "
            "every rank, with a free MASTER_PORT and an address that all reach, or give parallel.timeout_s=..."
        ) from error


def silent_ranks(rank: int, world_size: int) -> list[int]:
    """The ranks that do not answer a roll call, which goes through the store that they met at and not their group."""
    store = dist.distributed_c10d._get_default_store()
    end, silent = time.monotonic() + ROLL_CALL_S, list[int]()
    try:
        store.set_timeout(timedelta(seconds=ROLL_CALL_S))
        store.set(f"lp/here/{rank}", "")
    except RuntimeError:  # it went with the process that kept it
        return []
    for other in range(world_size):
        try:
            store.wait([f"lp/here/{other}"], timedelta(seconds=max(end - time.monotonic(), 0.1)))
        except RuntimeError:
            silent.append(other)
    return silent


def env_int(name: str, default: int, low: int = 0, high: float = math.inf) -> int:
    """An integer of the environment.

    Raises:
        ValueError: names the variable, its value and the remedy.
    """
    text = os.environ.get(name, str(default))
    value = int(text) if text.strip().isdecimal() else text
    return check_int(name, value, low, high, "launch with torchrun, or unset WORLD_SIZE for one process")
