"""What a journal costs a step: the time of its writes against that of the steps: docs/experiments/reliability.md.

python scripts/tables.py journal_cost
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import lp
from launch.data.prompts import load_builtin
from lp.engine.journal import Journal

from ._common import add_model_arguments, load_model, median_and_range


class TimedJournal(Journal):
    """A journal that measures how long each line took, in seconds."""

    def __init__(self, *args: Any) -> None:
        self.write_s: list[float] = []
        super().__init__(*args)

    def _write(self, line: dict[str, Any]) -> None:
        started = time.perf_counter()
        super()._write(line)
        self.write_s.append(time.perf_counter() - started)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--limit", type=int, default=4, help="of the built-in prompts")
    parser.add_argument("--max-new-tokens", type=int, default=256)


def run(args: argparse.Namespace) -> None:
    loaded = load_model(args)
    decoder = lp.LookaheadDecoder(loaded.model)
    steps_s: list[float] = []
    decoder.generate([1], 16)
    with tempfile.TemporaryDirectory() as folder:
        journal = TimedJournal(Path(folder) / "journal.jsonl", lp.ParallelContext())
        for prompt in load_builtin(args.limit):
            output = journal.generate(decoder, loaded.tokenizer(prompt.text)["input_ids"], args.max_new_tokens)
            steps_s += [step.forward_s + step.exchange_s + step.host_s for step in output.step_stats]
    share = sum(journal.write_s) / sum(steps_s)
    write_us = 1e6 * median(journal.write_s)
    step_ms = 1e3 * median(steps_s)
    steps = median_and_range([1e3 * seconds for seconds in steps_s], 2, " ms")
    lines = median_and_range([1e6 * seconds for seconds in journal.write_s], 1, " us")
    print(f"{len(steps_s)} steps, median {steps}; a line {lines}; in all {share:.3%} of step time")
    figures = {"steps": len(steps_s), "step_ms": step_ms, "write_us": write_us, "share": share}
    print(json.dumps({"model": args.model, **figures}))
