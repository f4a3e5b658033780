"""What a person waits for: code that may take long says what it is at, and a program with a terminal may show it.

    with waiting("reading the prompt", 4096, "tokens") as wait:
        wait.done += 128

Nothing is written here. A program listens with `heard_by`; where nobody does, a wait costs next to nothing. What a
thread of its own does is not heard.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(kw_only=True, slots=True)
class Wait:
    """Something that takes long.

    Attributes:
        what: is being done, and why where that isn't plain.
        total: how much there is to do; 0 where nobody knows.
        unit: what is counted.
        done: how much of it is done.
        first: how much of it was done when it began.
        began_s: by the monotonic clock.
    """

    what: str
    total: int = 0
    unit: str = ""
    done: int = 0
    first: int = 0
    began_s: float = field(default_factory=time.monotonic)


class Listener(Protocol):
    """Shows waits. One may begin within another."""

    def begins(self, wait: Wait) -> None: ...
    def ends(self, wait: Wait) -> None: ...


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def waiting(what: str, total: int = 0, unit: str = "") -> Iterator[Wait]:
    """Say that this is being done within the block; whoever runs it counts in `done`."""
    wait = Wait(what=what, total=total, unit=unit)
    listener = _LISTENER.get()
    if listener is None:
        yield wait
        return
    listener.begins(wait)
    try:
        yield wait
    finally:
        listener.ends(wait)


@contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """Within the block this listener hears of waits; None: nobody does, as where something else shows progress."""
    before = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(before)
