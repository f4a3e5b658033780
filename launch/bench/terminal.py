"""Show a benchmark on the terminal: its progress while it runs, its table at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .records import NoRecordsError, Record, load_records
from .table_text import caption, common, notes, ordered, table_of, varying
from .totals import Total, totals

UNLIMITED = 10_000  # columns: more than any table has


class ProgressBar:
    """A progress bar on stderr with the time left and the first method's S; on a terminal only.

    S: generated tokens per decode step.

    Args:
        visible: whether this rank shows it.
        prompts: how many prompts are still to be measured.
        records: records of the prompts that an earlier run has measured.
    """

    def __init__(self, visible: bool, prompts: int, records: Sequence[Record]) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        remaining = (TextColumn("ETA"), TimeRemainingColumn())
        console = Console(file=sys.stderr)
        self._bar = Progress(*columns, *remaining, console=console, disable=not (visible and console.is_terminal))
        self._tokens = 0
        self._steps = 0
        self._count(records)
        done = len({record["index"] for record in records})
        self._task = self._bar.add_task(self._description(), total=done + prompts, completed=done)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, records: Sequence[Record]) -> None:
        """Count one more prompt.

        Args:
            records: the prompt's records, from which S is updated.
        """
        self._count(records)
        self._bar.update(self._task, advance=1, description=self._description())

    def _count(self, records: Sequence[Record]) -> None:
        first = [record for record in records if record["method"] == records[0]["method"]]
        self._tokens += sum(record["tokens"] for record in first)
        self._steps += sum(record["steps"] for record in first)

    def _description(self) -> str:
        return f"S = {self._tokens / self._steps:.2f}" if self._steps else "S = ?"


class PipeConsole(Console):
    """A rich console that raises BrokenPipeError when a pipe's reader has left, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled once more; rich's own version of this hook ends the process.

        Raises:
            BrokenPipeError: the error that is being handled.
        """
        raise


def console_on(file: TextIO, width: int) -> Console:
    """A rich console that prints to a file or terminal.

    Args:
        file: where it prints.
        width: characters per line in a file; a terminal has its own width.
    """
    console = PipeConsole(file=file)
    return console if console.is_terminal else PipeConsole(file=file, width=width)


def empty_table(heads: Sequence[str], left: Sequence[str], **look: Any) -> Table:
    """A rich table with columns and no rows.

    Args:
        heads: heads of the columns.
        left: heads of the columns that are aligned to the left, as for names; the others are aligned to the right.
        look: further arguments of rich's Table, as in title="Speed".
    """
    table = Table(box=SIMPLE_HEAD, title_justify="left", **look)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=True)
    return table


def put(table: Table, console: Console) -> None:
    """Print a table. On a terminal too narrow for it every row becomes a paragraph: the name, then "head figure" pairs.

    Args:
        table: the table.
        console: where to print.
    """
    whole = Measurement.get(console, console.options.update(max_width=UNLIMITED), table).maximum
    if whole <= console.width:
        console.print(table)
        return
    say = partial(console.print, markup=False, highlight=False)
    if table.title:
        say(str(table.title))
    for name, *figures in zip(*(column.cells for column in table.columns), strict=True):
        say(str(name))
        pairs = zip(table.columns[1:], figures, strict=True)
        text = ", ".join(f"{column.header} {figure}" for column, figure in pairs)
        say(Padding(Text(text), (0, 0, 0, 2)))


def print_totals(found: Sequence[Total], console: Console) -> None:
    """Print a benchmark's table and the captions below it.

    Args:
        found: totals, one for each line.
        console: where to print.
    """
    heads, lines = table_of(found)
    table = empty_table(heads, ("method", "output"))
    for line in lines:
        table.add_row(*line)
    put(table, console)
    for text in (caption(found), *notes(found)):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def summary(found: Sequence[Total]) -> dict[str, Any]:
    """A benchmark's table as data, for output=json: shared settings, machine, figures of each line, and notes.

    Args:
        found: totals, one for each line.
    """
    machines = {"hardware": found[0].hardware, "versions": found[0].records[0]["versions"]}
    names = varying(found)
    lines = [{**{name: total.setting.get(name) for name in names}, **total.figures()} for total in found]
    return {"settings": common(found), **machines, "methods": lines, "notes": notes(found)}


def show_sweep(folder: Path) -> None:
    """Print one table of all jobs of a sweep, draw plots and report.html, and print their paths.

    Nothing is shown if no job wrote records.

    Args:
        folder: the folder of the sweep.

    Raises:
        ValueError: a *.jsonl file there has a line that is no record.
    """
    from .report import write_report  # matplotlib takes a while, and a run without a sweep needs none

    try:
        found = ordered(totals(load_records(folder)))
    except NoRecordsError:  # every job failed
        return
    console = console_on(sys.stdout, 160)
    print_totals(found, console)
    for path in write_report(folder):
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
