"""SIGINT and SIGTERM end a text after the current step, as an exception that has what was generated."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lp.engine.output import GenerationOutput


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came while a text was generated; or, among ranks, another rank got one or failed.

    Attributes:
        output: the text up to the end of a step, already given to `on_tokens`. Its `finish_reason` is "interrupted",
            or another one where the text ended with that step.
        signal: number of the signal that this rank got; 0 for none, where it stopped because another rank did.
        finished: outputs of a batch's sequences that were done.
        outputs: outputs of all sequences of a batch, in their order, as far as they are.
    """

    def __init__(self, output: GenerationOutput, signal: int) -> None:
        self.output, self.signal = output, signal
        self.finished: list[GenerationOutput] = []
        self.outputs: list[GenerationOutput] = [output]
        super().__init__(output, signal)

    def __str__(self) -> str:
        cause = signal.Signals(self.signal).name if self.signal else "another rank stopped"
        return f"{cause} after {len(self.output.tokens)} new tokens, which are in the attribute `output`"


class Terminated(KeyboardInterrupt):
    """This process was asked to end: by SIGTERM, or by another rank that was."""


def interruption(number: int) -> KeyboardInterrupt:
    """What to raise where there is no text to return, given the signal that this process got, 0 for none."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


def asked_to_end(error: KeyboardInterrupt) -> bool:
    """Whether it is due to SIGTERM or to another rank, and not to Ctrl-C."""
    return isinstance(error, Terminated) or (isinstance(error, Interrupted) and error.signal != signal.SIGINT)


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

    Outside the main thread, where Python allows no handlers, signals act as usual; those that are ignored stay so, and
    so do those whose handler is not Python's, which could not be put back. It may be entered again within itself, which
    changes nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = 0  # the number of the first one
        self._before: dict[int, object] = {}
        self._outermost: list[bool] = []  # by entry

    @property
    def requested(self) -> bool:
        """Whether a signal has come, and the step's end is to raise it."""
        return bool(self.received)

    def begin_step(self) -> None:
        """Called as a step begins. These signals end the texts of the step in which they come, so nothing is to do."""

    def take(self) -> int:
        """The number of the signal that has come, 0 for none; it counts no more."""
        received, self.received = self.received, 0
        return received

    def __enter__(self) -> DeferredSignals:
        self._outermost.append(not self._before)
        if self._outermost[-1] and threading.current_thread() is threading.main_thread():
            kept = signal.SIG_IGN, None
            deferred = [number for number in self.SIGNALS if signal.getsignal(number) not in kept]
            self._before = {number: signal.getsignal(number) for number in deferred}  # before _defer can be called
            try:
                for number in deferred:
                    signal.signal(number, self._defer)
            except BaseException:  # of the handler before, for a signal that came just now
                self.__exit__()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._outermost.pop():
            return
        try:
            with contextlib.ExitStack() as restored:  # all of them, also where one that is put back is called at once
                for number, handler in self._before.items():
                    restored.callback(signal.signal, number, handler)  # type: ignore[arg-type]
        finally:
            self._before = {}  # entered on another thread the next time, it has none

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        signal.signal(number, self._before[number])  # type: ignore[arg-type]


class SignalsOfSteps(DeferredSignals):
    """Signals for texts that take steps together: one that comes within a step ends none of them before the next."""

    def __init__(self) -> None:
        super().__init__()
        self._requested = False

    def begin_step(self) -> None:
        """Take note of signals that have come: they end the texts of the step that begins."""
        self._requested = bool(self.received)

    @property
    def requested(self) -> bool:
        """Whether one had come when the step began."""
        return self._requested

    def take(self) -> int:
        self._requested = False
        return super().take()
