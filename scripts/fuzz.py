"""Draw cases of decoding and compare each with transformers' own `generate`; a failing one is shrunk to one line.

    python scripts/fuzz.py --seconds 60                 # as many cases as fit
    python scripts/fuzz.py --cases 3000 --share 0.1     # a tenth of them with several ranks, which are threads
    python scripts/fuzz.py --archs qwen3_next lfm2      # of these architectures alone
    python scripts/fuzz.py --features bitwise           # every case has what is named, as far as it goes with the rest
    python scripts/fuzz.py --case '{"ids": [3, 1]}'     # one case again
    python scripts/fuzz.py --cases 100000 --processes 2 --ledger fuzz.jsonl     # goes on where it was stopped
    python scripts/fuzz.py --report fuzz.jsonl          # cases by commit and seed, pairs of features not met yet

Draws what tests/support/drawn_cases.py lists, its pairs of features in turn. Cases that failed once
(tests/fuzz_corpus.jsonl) run first. Ends with one JSON line; exit code 1 where a case failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.drawn_cases import FEATURES, Case, drawn, features
from tests.support.fuzz_ledger import Ledger, report
from tests.support.fuzzing import past_failures, run
from tests.support.shrinking import shrink
from tests.support.tiny_models import MATRIX

CHUNK = 10  # cases of a line of the ledger
CHUNKS_OF_A_PROCESS = 100  # FastAPI keeps every server of a process, and with it its model: 4 GB in 6000 cases


@dataclass(frozen=True)
class Draws:
    """Which cases a process of the run draws, and until when.

    Attributes:
        seed: numbers the drawing; case 7 of seed 0 is the same case in every run.
        share: part of the cases that have several ranks, 0 to 1.
        archs: model types to draw from; None: all of them.
        wanted: features that every case is to have.
        until: when no further case begins, in seconds of time.time(); None: never.
    """

    seed: int
    share: float
    archs: tuple[str, ...] | None
    until: float | None
    wanted: tuple[str, ...] = ()

    def run(self, first: int, count: int) -> dict[str, Any]:
        """Run `count` cases from number `first` on; the line of the ledger, of those that there was time for."""
        started = time.monotonic()
        kinds = Counter[str]()
        met: dict[str, int] = {}  # by feature, a bit for each case that has it
        for index in range(count):
            if self.until is not None and time.time() >= self.until:
                break
            case = drawn(self.seed, first + index, self.share, self.archs, self.wanted)
            kinds.update({"cases": 1, "several ranks": int(case.ranks > 1), "sampled": int(case.sampling is not None)})
            for name in features(case):
                met[name] = met.get(name, 0) | 1 << index
            if failure := run(case):
                kinds["failures"] += 1
                print(f"case {first + index} of seed {self.seed}, as drawn: {case.json()}")
                show(*shrink(case, failure))
        return {"first": first, **kinds, "seconds": round(time.monotonic() - started, 1), "features": met}


def show(case: Case, failure: str) -> None:
    """Print the failure, and the command that shows it again."""
    print(f"FAILED: {failure}\n  python scripts/fuzz.py --case {shlex.quote(case.json())}", flush=True)


def quiet() -> None:
    """Set up a process of the run: one thread, so that processes do not compete, and no warnings in its output."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def run_all(draws: Draws, chunks: Iterator[tuple[int, int]], processes: int) -> Iterator[dict[str, Any]]:
    """Run chunks of cases in this or in several processes; yields the ledger's line of each chunk when it is done."""
    if processes == 1:
        for chunk in chunks:
            if draws.until is not None and time.time() >= draws.until:
                return
            yield draws.run(*chunk)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, initializer=quiet, max_tasks_per_child=CHUNKS_OF_A_PROCESS) as pool:
        running = {pool.submit(draws.run, *chunk) for chunk in islice(chunks, 2 * processes)}
        while running:
            done = next(as_completed(running))
            running.remove(done)
            ended = draws.until is not None and time.time() >= draws.until
            if not ended and (following := next(chunks, None)):
                running.add(pool.submit(draws.run, *following))
            yield done.result()


def commit() -> str:
    """The short hash of this tree's commit, under which the ledger files a result; "+" is added where files changed."""
    git = ["git", "-C", str(Path(__file__).parent)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    return (found.stdout.strip() or "unknown") + ("+" if changed.stdout else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--share", type=float, default=0.1, help="of cases with several ranks")
    parser.add_argument("--archs", nargs="+", choices=MATRIX, help="names of tests/support/tiny_models.py to draw from")
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=[], help="that every case is to have")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--ledger", type=Path, help="file of the cases that have run, which are not run again")
    parser.add_argument("--case", help="run this one, as JSON")
    parser.add_argument("--report", type=Path, help="show what this ledger has")
    args = parser.parse_args()
    if args.report:
        print(report(Ledger(args.report).lines))
        return 0
    quiet()
    if args.case:
        case = Case(**json.loads(args.case))
        failure = run(case)
        if failure:
            show(case, failure)
        print(json.dumps({"cases": 1, "failures": int(bool(failure))}))
        return int(bool(failure))
    started = time.monotonic()
    total = Counter[str](failures=0)
    for case in past_failures():
        total["past failures"] += 1
        if failure := run(case):
            total["failures"] += 1
            show(case, failure)
    until = None if args.seconds is None else time.time() + args.seconds
    draws = Draws(args.seed, args.share, tuple(args.archs) if args.archs else None, until, tuple(args.features))
    settings = {"commit": commit(), "seed": args.seed, "share": args.share}
    settings |= {name: value for name in ("archs", "features") if (value := getattr(args, name))}
    last = args.first + (args.cases or (100 if args.seconds is None else 1 << 60))
    ledger = Ledger(args.ledger)
    for line in run_all(draws, ledger.missing(settings, args.first, last, CHUNK), args.processes):
        total.update({name: line[name] for name in ("cases", "several ranks", "sampled", "failures") if name in line})
        ledger.add(settings | line)
    print(json.dumps({"seed": args.seed, **total, "seconds": round(time.monotonic() - started)}))
    return int(total["failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
