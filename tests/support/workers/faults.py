"""A rank that things go wrong on, one after the other, and that writes down how each generation ended.

    torchrun ... -m tests.support.workers.faults FOLDER drift callback signal signal     # what to do, in order
    torchrun ... -m tests.support.workers.faults FOLDER endless                          # until it is killed

`signal` waits for one from outside: every rank writes FOLDER/GENERATION-RANK.pid once it has taken a few steps. In the
environment: LATE_S, seconds that the last rank comes late, and TIMEOUT_S, of a collective.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lp
from lp.engine.generation import Generation
from tests.support.tiny_models import tiny_model

STEP = 3  # at which things go wrong
CONFIG = lp.LookaheadConfig(window_size=5, ngram_size=4, guess_set_size=4)
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
CONTEXT = 1 << 17


class Rank:
    """This rank's part in each fault; the last rank is the one at fault."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            time.sleep(float(os.environ.get("LATE_S", "0")))
        timeout_s = float(os.environ.get("TIMEOUT_S", "120"))
        self.folder, self.context = folder, lp.ParallelContext.from_env(timeout_s=timeout_s)
        model = tiny_model(max_position_embeddings=CONTEXT).to(self.context.device)
        self.decoder = lp.LookaheadDecoder(model, CONFIG, self.context)
        self.at_fault = self.context.rank == self.context.world_size - 1
        self.ended: list[dict[str, Any]] = []

    def drift(self) -> None:
        """One token of this rank's window changes in memory."""
        learn = Generation._learn

        def learn_and_drift(generation: Generation, *args: Any) -> None:
            learn(generation, *args)
            if self.at_fault and len(generation.stats) == STEP:
                generation.window.levels[1][2] ^= 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Generation, "_learn", learn_and_drift)
            self._generate(200, lambda step: None)

    def callback(self) -> None:
        """This rank's callback fails."""

        def fail(step: int) -> None:
            if self.at_fault and step == STEP:
                raise ZeroDivisionError("from the callback")

        self._generate(200, fail)

    def signal(self) -> None:
        """Someone sends one to this process."""
        self._generate(10_000, self._step_aside)

    def endless(self) -> None:
        """Rank 0 prints as it goes."""

        def show(tokens: list[int], step: int) -> None:
            if self.context.is_main:
                print("step", step, flush=True)
            self._step_aside(step)

        self.decoder.generate(IDS, 100_000, on_tokens=show)

    def _step_aside(self, step: int) -> None:
        if step == STEP:
            here = self.folder / f"{len(self.ended)}-{self.context.rank}.pid"
            here.with_suffix(".new").write_text(str(os.getpid()))
            here.with_suffix(".new").rename(here)
        time.sleep(0.005)

    def _generate(self, new: int, each_step: Any) -> None:
        streamed: list[int] = []

        def on_tokens(tokens: list[int], step: int) -> None:
            streamed.extend(tokens)
            each_step(step)

        try:
            output = self.decoder.generate(IDS, new, on_tokens=on_tokens)
            end = {"reason": output.finish_reason, "tokens": output.tokens, "steps": output.steps}
        except lp.Interrupted as error:
            end = {"reason": f"raised {error.signal}", "tokens": error.output.tokens, "steps": error.output.steps}
        except (RuntimeError, ZeroDivisionError) as error:
            end = {"reason": f"{type(error).__name__}: {error}"}
        self.ended.append(end | {"streamed": streamed})


def main(folder: Path, faults: list[str]) -> None:
    rank = Rank(folder)
    for fault in faults:
        getattr(rank, fault)()
    (folder / f"{rank.context.rank}.json").write_text(json.dumps(rank.ended))
    number = rank.context.rank
    rank.context.close()
    tasks = Path("/proc/self/task")  # Linux alone has it
    names = [task.joinpath("comm").read_text().strip() for task in tasks.iterdir()] if tasks.exists() else []
    (folder / f"{number}.threads").write_text("\n".join(names))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
