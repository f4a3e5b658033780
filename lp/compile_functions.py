"""Compiles lp's functions by running them on the demo model: `python -m lp.compile_functions [NICENESS]`.

`lp.compile_cache` starts it once after an install. If several such processes start, one of them compiles; the others
wait, and then find the work done.
"""

from __future__ import annotations

import fcntl
import os
import sys
from typing import TYPE_CHECKING

from lp.compile_cache import NOW, SETTING, cache_folder, is_complete, mark_complete

if TYPE_CHECKING:
    from lp.parallel.context import ParallelContext

TOKENS = 24  # to generate in each run: enough that draft tokens are accepted, learned from and sampled


def main() -> None:
    """Compile all functions, unless another process has done so while this one waited for the lock."""
    if len(sys.argv) > 1:
        os.nice(int(sys.argv[1]))
    os.environ[SETTING] = NOW
    folder = cache_folder()
    if folder is None:
        return
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete():
            _compile()
            mark_complete()


def _compile() -> None:
    import numpy as np
    import torch

    import lp
    from lp.models.captured_step import fill_visible
    from lp.parallel.thread_ranks import run_lockstep

    torch.set_num_threads(1)
    loaded = lp.load("demo", device="cpu")
    ids = loaded.tokenizer("def quicksort(a):\n    if len(a) < 2:\n        return a\n")["input_ids"]
    times = lp.StepTimes((1, 64), (1.0, 1.1), plain_s=0.9)

    def decode(context: ParallelContext | None = None) -> None:
        decoder = lp.LookaheadDecoder(loaded.model, context=context, step_times=times)
        for sampling in (None, lp.SamplingParams(temperature=0.8)):
            decoder.generate(ids, TOKENS, sampling)
            decoder.generate_batch([ids, ids[::-1]], TOKENS, sampling)

    decode()
    run_lockstep(2, decode)
    lp.LookaheadDecoder(loaded.model, lp.PromptLookupConfig()).generate(ids, TOKENS)
    fill_visible(np.zeros((2, 1), np.int64), [-1, 0])  # of captured steps, on a GPU


if __name__ == "__main__":
    main()
