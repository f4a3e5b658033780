"""Draw cases of decoding and compare each with transformers' own `generate`; a failing one is shrunk to one line.

    python scripts/fuzz.py --seconds 60                 # as many cases as fit
    python scripts/fuzz.py --cases 3000 --share 0.1     # a tenth of them with several ranks, which are threads
    python scripts/fuzz.py --archs qwen3_next lfm2      # of these architectures alone
    python scripts/fuzz.py --case '{"ids": [3, 1]}'     # one case again

Draws: architecture, sizes, weights in float64, attention backend, prompt, W, N, G, depth, the pool's switches, the
method, 2 to 8 ranks, how many of them hold a model between them, kv_sync, coupled sampling, logits processors, stops,
other texts that share steps.
Cases that failed once (tests/fuzz_corpus.jsonl) run first. Ends with one JSON line; exit code 1 where a case failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fuzzing import Case, drawn, past_failures, run
from tests.shrinking import shrink
from tests.tiny_models import MATRIX


def report(case: Case, failure: str) -> None:
    """The failure, and the command that shows it again."""
    print(f"FAILED: {failure}\n  python scripts/fuzz.py --case {shlex.quote(case.json())}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--share", type=float, default=0.1, help="of cases with several ranks")
    parser.add_argument("--archs", nargs="+", choices=MATRIX, help="names of tests/tiny_models.py to draw from")
    parser.add_argument("--case", help="run this one, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if args.case:
        case = Case(**json.loads(args.case))
        failure = run(case)
        if failure:
            report(case, failure)
        print(json.dumps({"cases": 1, "failures": int(bool(failure))}))
        return int(bool(failure))
    started = time.monotonic()
    kinds = Counter[str]()
    failures = 0
    for case in past_failures():
        kinds["past failures"] += 1
        failure = run(case)
        if failure:
            failures += 1
            report(case, failure)
    last = args.first + (args.cases or (100 if args.seconds is None else 1 << 60))
    for number in range(args.first, last):
        if args.seconds is not None and time.monotonic() - started >= args.seconds:
            break
        case = drawn(args.seed, number, args.share, args.archs)
        kinds["cases"] += 1
        kinds["several ranks"] += case.ranks > 1
        kinds["sampled"] += case.sampling is not None
        failure = run(case)
        if failure:
            failures += 1
            print(f"case {number} of seed {args.seed}, as drawn: {case.json()}")
            report(*shrink(case, failure))
    print(json.dumps({"seed": args.seed, **kinds, "failures": failures, "seconds": round(time.monotonic() - started)}))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
