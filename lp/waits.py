"""Progress of long work: code that may take long announces it, and a program with a terminal may show it.

    with waiting("reading the prompt", 4096, "tokens") as wait:
        wait.done += 128

This module prints nothing. A program passes a listener to `heard_by` to be told of long work; without a listener,
announcements cost next to nothing. Work in other threads is not announced.
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
    """One piece of long work, with its progress, for a listener to show.

    Attributes:
        what: phrase that says what is being done, such as "reading the prompt".
        total: number of units to do, such as tokens; 0 if the number is not known.
        unit: name of the units, such as "tokens".
        done: number of units done so far; the code that does the work counts it up.
        first: number of units that were done when the work began.
        began_s: time at which the work began, seconds of the monotonic clock.
    """

    what: str
    total: int = 0
    unit: str = ""
    done: int = 0
    first: int = 0
    began_s: float = field(default_factory=time.monotonic)


class Listener(Protocol):
    """Interface of an object that shows the progress of long work; `heard_by` takes it.

    It is told when a piece of long work begins and when it ends. Such work may begin within other long work.
    """

    def begins(self, wait: Wait) -> None: ...
    def ends(self, wait: Wait) -> None: ...


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def waiting(what: str, total: int = 0, unit: str = "") -> Iterator[Wait]:
    """A `with` block that announces the long work done in it; the block counts its progress in `done` of the Wait.

    Args:
        what: phrase that says what is being done, such as "reading the prompt".
        total: number of units to do; 0 if the number is not known.
        unit: name of the units, such as "tokens".
    """
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
    """A `with` block in which a listener is told of the long work that this thread does.

    Args:
        listener: object that is told; None: nobody is told, as where something else shows progress.
    """
    before = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(before)
