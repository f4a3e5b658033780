"""A rank that generates drawn cases and writes down what it gave and which collectives it called.

torchrun ... -m tests.support.workers.cases FOLDER FIRST LAST     # seeds FIRST..LAST-1 -> FOLDER/rank.json
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

import lp
from lp.budget.step_times import StepTimes
from tests.support.pools import drawn_step_times, drawn_switches
from tests.support.switches import lookahead_config
from tests.support.tiny_models import VOCABULARY, runs_here, tiny_model
from tests.support.workers.collectives import Watch


@dataclass
class Case:
    """What a seed stands for."""

    arch: str
    model_seed: int
    ids: list[int]
    new: int
    eos: int
    config: lp.LookaheadConfig
    step_times: StepTimes
    kv_dtype: str

    @classmethod
    def drawn(cls, seed: int) -> Case:
        rng = random.Random(f"gloo-{seed}")
        words = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))] for _ in range(5)]
        ids = [token for _ in range(rng.randint(1, 12)) for token in rng.choice(words)]
        config = lookahead_config(
            window_size=rng.randint(0, 12),
            ngram_size=rng.randint(2, 6),
            guess_set_size=rng.randint(0, 10),
            draft_depth=rng.choice([None, None, 9]),
            kv_sync=list(lp.KVSync)[seed % 2],
            **drawn_switches(rng),
        )
        arch = rng.choice(["llama", "llama", "gemma3", "mistral_sliding", "qwen3_5", "falcon_h1", "lfm2"])
        arch = arch if runs_here(arch) else "llama"
        return cls(
            arch, rng.randrange(8), ids, rng.randint(8, 40), rng.randrange(VOCABULARY), config, drawn_step_times(rng),
            ["auto", "int8", "fp8"][seed % 3],
        )  # fmt: skip


def main(folder: Path, first: int, last: int) -> None:
    torch.set_num_threads(1)
    context = lp.ParallelContext.from_env()
    results = []
    for seed in range(first, last):
        case = Case.drawn(seed)
        model = tiny_model(case.arch, seed=case.model_seed).to(context.device)
        settings = {"step_times": case.step_times, "kv_dtype": case.kv_dtype}
        decoder = lp.LookaheadDecoder(model, case.config, context, **settings)
        with pytest.MonkeyPatch.context() as patch:
            watch = Watch(patch)
            output = decoder.generate(case.ids, case.new, eos_token_id=case.eos, on_tokens=watch.on_tokens)
        results.append(
            {
                "seed": seed,
                "backend": context.backend,
                "device": str(context.device),
                "tokens": output.tokens,
                "accepted": [step.accepted for step in output.step_stats],
                "before": asdict(watch.before),
                "steps": [asdict(step) for step in watch.steps],
                "after": asdict(watch.now),
            }
        )
    (folder / f"{context.rank}.json").write_text(json.dumps(results))
    context.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
