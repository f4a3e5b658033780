"""What a journal costs a step: the time of its writes against that of the steps, on the built-in prompts.

python scripts/journal_cost.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import lp
from launch.bench.prompts import load_builtin
from lp.engine.journal import Journal
from lp.models.loader import load


class TimedJournal(Journal):
    """A journal that knows how long each line took, in seconds."""

    def __init__(self, *args: Any) -> None:
        self.took_s: list[float] = []
        super().__init__(*args)

    def _write(self, line: dict[str, Any]) -> None:
        started = time.perf_counter()
        super()._write(line)
        self.took_s.append(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(args.model)
    decoder, steps_s = lp.LookaheadDecoder(loaded.model), list[float]()
    decoder.generate([1], 16)
    with tempfile.TemporaryDirectory() as folder:
        journal = TimedJournal(Path(folder) / "journal.jsonl", lp.ParallelContext())
        for prompt in load_builtin(args.limit):
            output = journal.generate(decoder, loaded.tokenizer(prompt.text)["input_ids"], args.max_new_tokens)
            steps_s += [s.forward_s + s.exchange_s + s.host_s for s in output.step_stats]
    share, write_us, step_ms = sum(journal.took_s) / sum(steps_s), 1e6 * median(journal.took_s), 1e3 * median(steps_s)
    print(f"{len(steps_s)} steps, median {step_ms:.2f} ms; a line {write_us:.1f} us; in all {share:.3%} of step time")
    figures = {"steps": len(steps_s), "step_ms": step_ms, "write_us": write_us, "share": share}
    print(json.dumps({"model": args.model, **figures}))


if __name__ == "__main__":
    main()
