"""SIGINT and SIGTERM end a text after the current decode step, with an exception that has the tokens so far."""

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
    """Raised by `generate` after SIGINT or SIGTERM, with the tokens so far; among ranks, also if another rank stopped.

    Attributes:
        output: the tokens up to the end of a decode step, which `on_tokens` has had already. Its `finish_reason` is
            "interrupted", or another one if the text ended with that very step.
        signal: number of the signal that this rank got; 0: it got none, and stopped because another rank did.
        finished: the complete outputs, if it is a batch.
        outputs: the outputs of all prompts of a batch in their order, with the tokens so far.
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
    """Raised, as Ctrl-C raises KeyboardInterrupt, where SIGTERM asked this process or another rank to end."""


def interruption(number: int) -> KeyboardInterrupt:
    """The exception to raise after a signal where there is no text to return.

    Args:
        number: the signal that this process got; 0: another rank got it.

    Returns:
        KeyboardInterrupt for SIGINT, else Terminated.
    """
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


def asked_to_end(error: KeyboardInterrupt) -> bool:
    """Whether an interruption comes from SIGTERM or from another rank, and not from Ctrl-C in this process."""
    return isinstance(error, Terminated) or (isinstance(error, Interrupted) and error.signal != signal.SIGINT)


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """While entered, SIGTERM raises Terminated, so that `finally` blocks run; `generate` defers it to a step's end."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class DeferredSignals:
    """While entered, holds SIGINT and SIGTERM back, so that a decode step can finish: the first one sets `requested`.

    A second signal of the same number acts as it would without this object. Signals act as usual outside the main
    thread, where Python allows no handlers. A signal that is ignored stays ignored, and one whose handler was not set
    from Python keeps it, since Python could not restore it. Entering it again while it is entered changes nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = 0  # number of the first signal; 0 for none
        self._before: dict[int, object] = {}
        self._outermost: list[bool] = []  # by entry

    @property
    def requested(self) -> bool:
        """Whether SIGINT or SIGTERM has come and not been taken (`take`): the texts end with this step."""
        return bool(self.received)

    def begin_step(self) -> None:
        """Called as a step begins; nothing to do here, since a signal ends the texts of the step in which it comes."""

    def take(self) -> int:
        """Return the number of the signal that has come, 0 for none, and forget it."""
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
    """Deferred signals for texts that share steps: a signal takes effect when the next step begins, for all of them.

    Otherwise a signal within a step could end some of its texts and not the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._requested = False

    def begin_step(self) -> None:
        """Let a signal that has come by now end the texts of the step that begins."""
        self._requested = bool(self.received)

    @property
    def requested(self) -> bool:
        """Whether SIGINT or SIGTERM had come when the current step began: its texts end with it."""
        return self._requested

    def take(self) -> int:
        self._requested = False
        return super().take()
