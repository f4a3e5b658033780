"""A line on the terminal that says what a run waits for, how far that is, and how long it will take."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from lp.waits import Wait, heard_by

from .once import rank

SHOWN_AFTER_S = 1.0  # a shorter wait needs no word
REFRESH_S = 0.5
APART_S = 0.5  # waits that follow each other sooner are one: ten of half a second each are five seconds without a word
LONG_S = 60.0  # a log gets one line of a wait that is as long as that
DIM, RESET, ERASE_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[2K"


class WaitLine:
    """Shows long waits, such as loading weights: on a terminal as a line that is refreshed, and erased at the end.

    If the file is no terminal, a single line is written in the whole run, about the first wait longer than a minute.

    Args:
        file: where the line is written, such as stderr.
        terminal: whether `file` is a terminal that takes escape codes.
    """

    def __init__(self, file: TextIO, terminal: bool) -> None:
        self._file, self._terminal = file, terminal
        self._waits: list[Wait] = []
        self._lock = threading.Lock()
        self._shown = self._said = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._since_s = self._until_s = -math.inf  # when the waits that follow each other began, and the last ended

    def begins(self, wait: Wait) -> None:
        """Note that a wait begins; the line appears once it has lasted a second."""
        with self._lock:
            if not self._waits and wait.began_s - self._until_s > APART_S:
                self._since_s = wait.began_s
            self._waits.append(wait)
            if self._thread is None:
                self._thread = threading.Thread(target=self._refresh, name="wait line", daemon=True)
                self._thread.start()

    def ends(self, wait: Wait) -> None:
        """Note that a wait has ended, and erase its line, since generated text may come next."""
        with self._lock:
            self._waits.remove(wait)
            self._until_s = time.monotonic()
            self._erase()

    def close(self) -> None:
        """Stop the thread that refreshes the line, so that no more waits are shown."""
        self._ended.set()
        if self._thread:
            self._thread.join()

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_S):
            with self._lock:
                now_s = time.monotonic()
                if not self._waits or now_s - self._since_s < SHOWN_AFTER_S:
                    continue
                text = describe(shown_of(self._waits), now_s)
                if self._terminal:
                    columns = shutil.get_terminal_size().columns
                    self._put(f"{ERASE_LINE}{DIM}{text[: columns - 1]}{RESET}")
                    self._shown = True
                elif not self._said and now_s - self._waits[0].began_s > LONG_S:
                    self._said = True
                    self._put(f"{text}\n")

    def _erase(self) -> None:
        if self._shown:
            self._put(ERASE_LINE)
            self._shown = False

    def _put(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except (OSError, ValueError):  # nobody reads it any more
            self._ended.set()


def shown_of(waits: list[Wait]) -> Wait:
    """The wait to show, of several nested waits: the outermost whose total is known, else the innermost.

    Args:
        waits: waits that have begun and not ended, the outermost first; at least one.
    """
    return next((wait for wait in waits if wait.total), waits[-1])


def describe(wait: Wait, now_s: float) -> str:
    """The line for a wait: "reading the prompt: 512 of 4,096 tokens, 3 s, about 21 s left".

    Args:
        wait: the wait, which has not ended.
        now_s: the present value of time.monotonic(), in seconds.
    """
    passed_s = now_s - wait.began_s
    if not wait.total:
        return f"{wait.what} ({duration(passed_s)})"
    text = f"{wait.what}: {wait.done:,} of {wait.total:,} {wait.unit}".rstrip()
    done = wait.done - wait.first
    left = f", about {duration(passed_s * (wait.total - wait.done) / done)} left" if done > 0 else ""
    return f"{text}, {duration(passed_s)}{left}"


def duration(seconds: float) -> str:
    """Seconds as people say them: "12 s", "4 min", "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def waits_shown() -> Iterator[None]:
    """Within the block, rank 0 shows long waits, such as loading weights, on stderr; other ranks show nothing."""
    if rank() > 0 or sys.stderr is None:
        yield
        return
    line = WaitLine(sys.stderr, sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
    try:
        with heard_by(line):
            yield
    finally:
        line.close()
