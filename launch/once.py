"""What several ranks have to say of a failure is printed by one of them.

They agree through the store that torchrun keeps for its ranks, from before the first starts until the last has ended.
So it matters neither how much later one rank fails than another, nor how soon torchrun ends the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist

LATE_S = 3.0  # for so long the others leave it to rank 0, whose line names no rank
PATIENCE_S = 30.0  # for the store, or a rank that has begun to print: on a busy machine both may be slow


def rank() -> int:
    """This process's, as the launcher has it; 0 without one."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0  # refused later, by name


def print_once(text: str) -> None:
    """Print lines on stderr, unless another rank of this launch has printed them.

    A rank that comes with the same text again, as in the next job of a sweep, prints it again. Under a launcher that is
    not torchrun there is no store to agree through: every rank prints, rank 0 first.

    Args:
        text: the same on all ranks that have the error. Ranks but the first are named before it, as a model may be
            missing on one node alone.
    """
    mine = rank()
    store, key = _store(), f"lp/once/{hashlib.blake2b(text.encode('utf-8', 'surrogatepass')).hexdigest()}"
    with contextlib.suppress(RuntimeError):  # the store is gone, and torchrun with it
        key += f"/{store.add(f'{key}/rank {mine}', 1)}"
        if mine > 0 and _printed(store, key, LATE_S):
            return
        if store.add(key, 1) > 1 and _printed(store, key, PATIENCE_S):
            return
    print(f"[rank {mine}] " * (mine > 0) + text, file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):
        store.set(f"{key}/printed", "")


def _printed(store: dist.Store, key: str, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not store.check([f"{key}/printed"]):  # TCPStore's own wait logs a warning when the time is up
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _store() -> dist.Store:
    """torchrun's; this rank's own where there is none, or none that can be reached."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        with contextlib.suppress(RuntimeError, ValueError, KeyError):
            where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            return dist.TCPStore(*where, timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False)
    return dist.HashStore()
