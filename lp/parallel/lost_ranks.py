"""Which ranks are lost when a collective fails: a roll call through the store that the ranks met at."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

ROLL_CALL_S = 3.0  # a rank whose collective failed waits so long for the others to find out too


def differing(names: Sequence[str]) -> str:
    """The message of the error where ranks are in different calls.

    Args:
        names: what each rank is doing.
    """
    ranks = {name: [rank for rank, other in enumerate(names) if other == name] for name in names}
    doing = ", ".join(f"rank {', '.join(map(str, those))} is {name}" for name, those in ranks.items())
    return f"{doing}; give every rank the same calls in the same order"


def announce(rank: int, call: str) -> None:
    """Leave what this rank is doing in the store that the ranks met at, for a roll call."""
    _store().set(f"lp/call/{rank}", call)


def roll_call(rank: int, world_size: int) -> str:
    """Who is to blame for a collective that failed: the ranks that do not answer, or the store if it does not.

    It goes through the store that the ranks met at, and not through their group. Takes about twice ROLL_CALL_S at most.
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
    """The outcome of a roll call.

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
