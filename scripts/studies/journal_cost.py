"""What a journal costs a step: the time of its writes against that of the steps.

python scripts/tables.py journal_cost
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import lp
from lp.engine.journal import Journal

from .harness import Method, PromptStudy, Result, Row, Table, option, spread


class TimedJournal(Journal):
    """A journal that measures how long each line took, in seconds."""

    def __init__(self, *args: Any) -> None:
        self.write_s: list[float] = []
        super().__init__(*args)

    def _write(self, line: dict[str, Any]) -> None:
        started = time.perf_counter()
        super()._write(line)
        self.write_s.append(time.perf_counter() - started)


@dataclass(kw_only=True)
class JournalCost(PromptStudy):
    """Decodes prompts with a journal, and compares the time of its writes with that of the steps."""

    limit: int | None = option(4, "first prompts of the task")

    def rows(self) -> Iterable[Row]:
        return self.prompt_rows()

    @cached_property
    def decoder(self) -> lp.LookaheadDecoder:
        """The default decoder, after a first text that no figure is to include."""
        decoder = lp.LookaheadDecoder(self.loaded.model)
        decoder.generate([1], 16)
        return decoder

    def methods(self) -> Mapping[str, Method]:
        def journaled(row: Row) -> Result:
            with tempfile.TemporaryDirectory() as folder:
                journal = TimedJournal(Path(folder) / "journal.jsonl", lp.ParallelContext())
                output = journal.generate(self.decoder, self.ids(row.item), self.max_new_tokens)
            steps_s = [step.forward_s + step.exchange_s + step.host_s for step in output.step_stats]
            return {"steps_s": steps_s, "write_s": journal.write_s}

        return {"": journaled}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        steps_s, write_s = ([each for result in results for each in result[name]] for name in ("steps_s", "write_s"))
        step_ms = spread([1e3 * each for each in steps_s], 2)
        write_us = spread([1e6 * each for each in write_s], 1)
        share = f"{sum(write_s) / sum(steps_s):.3%}"
        heads = ("steps", "a step, ms", "a line, us", "lines of step time")
        yield Table(heads, [(str(len(steps_s)), step_ms, write_us, share)])
