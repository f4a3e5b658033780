"""Progress of a batch on stderr: a bar on a terminal, a line a minute in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .places import Reply

LOGGED_S = 60.0


class BatchProgress:
    """Shows on stderr how many requests are answered, and counts tokens and decode steps for the summary.

    It is a context manager: the progress bar is shown while it is open.

    Args:
        total: number of requests in the input file.
        done: number of requests that earlier runs have answered.
        failed: how many of these answers are errors.
        file: name of the file of answers, for the summary.
    """

    def __init__(self, total: int, done: int, failed: int, file: str) -> None:
        self.total, self.done, self.failed = total, done, failed
        self._before = done
        self._file = file
        self._tokens = self._steps = 0
        self._began_s = self._logged_s = time.monotonic()
        console = Console(stderr=True)
        columns = TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> BatchProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def count(self, replies: list[Reply | None], done: int, failed: int) -> None:
        """Count answers that have just been written to the disk.

        Args:
            replies: the new answers; None for a request that got an error instead.
            done: number of answers that the file has by now.
            failed: how many of all its answers are errors.
        """
        for reply in replies:
            usage = reply.body.get("usage") if reply else None
            if isinstance(usage, dict):
                self._tokens += _count(usage.get("completion_tokens", usage.get("output_tokens")))
                self._steps += _count(usage.get("steps"))
        self.done, self.failed = done, failed
        self.say("")

    def say(self, trouble: str) -> None:
        """Update the bar; in a log, print a line if the last one is more than LOGGED_S seconds old.

        Args:
            trouble: the current problem, such as "waiting for a server"; "" if there is none.
        """
        told = ", ".join(filter(None, [f"{self._rate:.0f} tokens/s", self._errors(), trouble]))
        self._bar.update(self._task, completed=self.done, description=told)
        now_s = time.monotonic()
        if self._bar.disable and now_s - self._logged_s > LOGGED_S:
            self._logged_s = now_s
            print(f"answered {self.done:,} of {self.total:,}, {told}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """The run's result in one line, with S, the mean number of tokens that a decode step adds.

        An example is "8 of 8 requests are answered in out.jsonl; 640 tokens, 52 tokens/s; S 2.10".
        """
        figures = [f"{self.done:,} of {self.total:,} requests are answered in {self._file}"]
        if self._before:
            figures.append(f"{self._before:,} of them by an earlier run")
        figures += filter(None, [self._errors()])
        if self._tokens:
            figures.append(f"{self._tokens:,} tokens, {self._rate:.0f} tokens/s")
        if self._steps:
            figures.append(f"S {self._tokens / self._steps:.2f}")
        return "; ".join(figures)

    def _errors(self) -> str:
        return f"{self.failed:,} with an error" if self.failed else ""

    @property
    def _rate(self) -> float:
        return self._tokens / max(time.monotonic() - self._began_s, 1e-9)


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
