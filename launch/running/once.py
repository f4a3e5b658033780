"""Print once what every rank would print, such as an error that all ranks have.

The ranks agree which of them prints, through torchrun's store. It exists before the first rank starts and until the
last one has ended. So it does not matter how much later one rank fails than another, or how soon torchrun ends the
others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import torch.distributed as dist

    from lp.parallel.context import ParallelContext

RANK_0_FIRST_S = 3.0  # so long the others leave it to rank 0, whose line names no rank
PATIENCE_S = 30.0  # for the store, or a rank that has begun to print: on a busy machine both may be slow


def rank() -> int:
    """This process's rank, as the launcher set it in the environment; 0 without a launcher."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0  # refused later, by name


def print_once(text: str) -> None:
    """Print a text on stderr, unless another rank of this launch has printed it.

    A rank that calls this with an equal text again, as in the next job of a sweep, prints it again. Launchers other
    than torchrun have no store through which ranks could agree. Every rank prints under them, rank 0 first.

    Args:
        text: the text, equal on all ranks that would print it. A rank other than 0 writes its number before the text,
            as an error may occur on one node alone.
    """
    this = rank()
    store = _torchrun_store()
    if store is None:
        if this > 0:
            time.sleep(RANK_0_FIRST_S)
        _print(text, this)
        return
    key = f"lp/once/{hashlib.blake2b(text.encode('utf-8', 'surrogatepass')).hexdigest()}"
    with contextlib.suppress(RuntimeError):  # the store is gone, and torchrun with it
        key += f"/{store.add(f'{key}/rank {this}', 1)}"
        if this > 0 and _printed(store, key, RANK_0_FIRST_S):
            return
        if store.add(key, 1) > 1 and _printed(store, key, PATIENCE_S):
            return
    _print(text, this)
    with contextlib.suppress(RuntimeError):
        store.set(f"{key}/printed", "")


def _print(text: str, this: int) -> None:
    print(f"[rank {this}] {text}" if this > 0 else text, file=sys.stderr, flush=True)


def _printed(store: dist.Store, key: str, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not store.check([f"{key}/printed"]):  # TCPStore's own wait logs a warning when the time is up
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _torchrun_store() -> dist.Store | None:
    """The store that torchrun has for its ranks; None without torchrun, or if it can't be reached."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist  # takes seconds: an error of a single process needs none of it

    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(*address, timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False)
    return None


@contextlib.contextmanager
def on_rank_0(context: ParallelContext, file: TextIO) -> Iterator[TextIO]:
    """Give the block a file to print to: `file` on rank 0, /dev/null on other ranks.

    Args:
        context: this rank's context.
        file: where rank 0 prints.
    """
    if context.is_main:
        yield file
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        yield nowhere
