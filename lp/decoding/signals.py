"""SIGINT and SIGTERM as a request to stop after the current step, so that nothing generated is lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """This process was asked to end: by SIGTERM, or by another rank that was."""


def interruption(number: int) -> KeyboardInterrupt:
    """What to raise where a text was interrupted, given the signal that this process got, 0 for none."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """While entered, SIGTERM raises Terminated as SIGINT does KeyboardInterrupt; in `generate` both are deferred."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class DeferredSignals:
    """While entered, the first SIGINT or SIGTERM sets `requested`; a second one of its kind acts as it did before.

    Outside the main thread, where Python allows no handlers, signals act as usual.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = 0  # the number of the first one
        self._before: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """Whether one has come."""
        return bool(self.received)

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._defer) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        signal.signal(number, self._before[number])  # type: ignore[arg-type]
