"""A rank to which something happens between two steps of a short text, which it writes to a journal.

Happens to one rank, behind one step: `killed` and `stopped` by a signal, or `late` by a part of the time limit.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch

import lp
from lp.engine.journal import Journal
from tests.support.tiny_models import tiny_model

IDS, NEW = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], 12
SAMPLING = lp.SamplingParams(temperature=0.8, seed=3)
CONFIG = lp.LookaheadConfig(window_size=2, ngram_size=2, guess_set_size=2, pool_mib=1)
EVERY = -1
TIMEOUT_S = 20.0  # of a collective, and for the ranks to meet, of which a dozen start at once
LATE_S = 0.5


def happen(what: str) -> None:
    """Do to this process what happens to it: it is killed, stopped, or late."""
    if what == "late":
        time.sleep(LATE_S)
    else:
        os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGSTOP)


def main(folder: Path, what: str, victim: int, at: int) -> None:
    """Generate; `at` is the number of a step, or EVERY."""
    torch.set_num_threads(1)
    context = lp.ParallelContext.from_env(timeout_s=TIMEOUT_S)
    decoder = lp.LookaheadDecoder(tiny_model(), CONFIG, context)

    def on_tokens(tokens: list[int], step: int) -> None:
        if context.rank == victim and at in (step, EVERY):
            happen(what)

    output = Journal(folder / "journal.jsonl", context).generate(decoder, IDS, NEW, SAMPLING, on_tokens=on_tokens)
    (folder / f"{context.rank}.json").write_text(json.dumps(output.tokens))
    context.close()
