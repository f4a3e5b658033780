"""A rank that generates with a journal, greedy and sampled, and kills itself at a step of its own in the first starts.

torchrun --max-restarts 2 ... -m tests.support.workers.restart FOLDER RANK:STEP RANK:STEP
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

import lp
from lp.engine.journal import Journal
from tests.support.tiny_models import tiny_model
from tests.support.workers.faults import IDS

NEW = 120
SAMPLINGS = [None, lp.SamplingParams(temperature=0.9)]  # whose seed is drawn
CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4)


def main(folder: Path, deaths: list[str]) -> None:
    torch.set_num_threads(1)
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    context = lp.ParallelContext.from_env()
    victim, last = map(int, deaths[start].split(":")) if start < len(deaths) else (-1, -1)
    decoder = lp.LookaheadDecoder(tiny_model(), CONFIG, context)
    journal, steps, outputs = Journal(folder / "journal.jsonl", context), 0, []

    def on_tokens(tokens: list[int], step: int) -> None:
        nonlocal steps
        steps += 1
        if context.rank == victim and steps == last:
            os.kill(os.getpid(), signal.SIGKILL)

    for sampling in SAMPLINGS:
        outputs.append(journal.generate(decoder, IDS, NEW, sampling, on_tokens=on_tokens))
    said = [{"tokens": output.tokens, "resumed": output.resumed, "reason": output.finish_reason} for output in outputs]
    (folder / f"{context.rank}.json").write_text(json.dumps({"outputs": said, "seed": journal.seed, "start": start}))
    context.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
