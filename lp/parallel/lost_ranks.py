"""Finds out which ranks are lost after a collective has failed.

For this roll call, ranks answer in the key-value store of torch.distributed at which they met at the start. This file
only names the lost ranks. What is done about them is decided in `lp.parallel.rank_group` (`ProcessRankGroup.answered`
raises RankLost) and in `lp.parallel.device_waits` (`DeviceWaits.abandon` aborts collectives that hang on the GPU).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

ROLL_CALL_S = 3.0  # seconds that a rank whose collective failed waits for the others to notice and answer


def differing(names: Sequence[str]) -> str:
    """Word the error message for ranks that are doing different things.

    For example "rank 0, 2 is making a LookaheadDecoder, rank 1 is in a step of generate; give every rank the same calls
    in the same order".

    Args:
        names: what each rank is doing, in the order of the ranks.
    """
    ranks = {name: [rank for rank, other in enumerate(names) if other == name] for name in names}
    doing = ", ".join(f"rank {', '.join(map(str, those))} is {name}" for name, those in ranks.items())
    return f"{doing}; give every rank the same calls in the same order"


def announce(rank: int, call: str) -> None:
    """Note in the job's key-value store what a rank is about to do, so that a later roll call can report it.

    Args:
        rank: number of this rank in the whole job.
        call: what the rank is doing, as in "making a LookaheadDecoder".
    """
    _store().set(f"lp/call/{rank}", call)


def roll_call(rank: int, world_size: int) -> str:
    """Find out why a collective failed, as the beginning of an error message, such as "rank 3 does not answer".

    All ranks whose collective failed answer in the key-value store at which they met, not through their process group.
    This takes at most about 2 x ROLL_CALL_S seconds.

    Args:
        rank: number of this rank in the whole job.
        world_size: number of ranks of the job.

    Returns:
        Which ranks do not answer; or that the store is gone, and who held it. If all ranks answer, it says that a rank
        was late, and what each rank was doing if that differs.
    """
    answers: list[str] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(_asked(rank, world_size))

    asking = threading.Thread(target=ask, daemon=True)  # a store that is frozen answers no call, time limit or not
    asking.start()
    asking.join(2 * ROLL_CALL_S)
    if answers:
        return answers[0]
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    holder = "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    return f"the store at {where}, which {holder} holds, is gone: {holder} has ended or does not answer"


def _asked(rank: int, world_size: int) -> str:
    """Answer the roll call, and wait for the other ranks' answers; returns its outcome in words.

    Raises:
        RuntimeError: the store is gone.
    """
    store, end, silent = _store(), time.monotonic() + ROLL_CALL_S, list[int]()
    here = [f"lp/here/{other}" for other in range(world_size)]
    store.set(here[rank], "")
    for other in range(world_size):
        try:
            store.wait([here[other]], timedelta(seconds=max(end - time.monotonic(), 0.1)))
        except RuntimeError:
            store.check([here[rank]])  # it raises where the store is what went
            silent.append(other)
    if silent:
        return f"rank {', '.join(map(str, silent))} does not answer"
    calls = [f"lp/call/{other}" for other in range(world_size)]
    names = [store.get(call).decode() if store.check([call]) else "starting" for call in calls]
    return "a rank came too late, or an exchange failed" + f" ({differing(names)})" * (len({*names}) > 1)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
