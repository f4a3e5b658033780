"""A rank of replicas that ranks divide: it decodes drawn models, and writes down what came out and what it cost.

torchrun ... -m tests.support.workers.replicas FOLDER TP ARCHITECTURE...     # -> FOLDER/rank.json
torchrun ... -m tests.support.workers.replicas FOLDER TP bitwise             # of one replica -> FOLDER/rank.json
torchrun ... -m tests.support.workers.replicas FOLDER TP endless             # until a rank is killed
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lp
from lp.budget.step_times import StepTimes
from lp.engine.journal import Journal
from lp.models.tensor_parallel import divide
from tests.support.tiny_models import tiny_model

IDS, NEW = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], 20
TIMES = StepTimes((1, 8, 32), (1.0, 1.1, 1.5), 1.0)
ADAPTIVE = lp.LookaheadConfig()
BROADCAST = lp.LookaheadConfig(
    window_size=4, ngram_size=3, guess_set_size=5, ablation=lp.Ablation(kv_sync=lp.KVSync.BROADCAST)
)
COMPUTE = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=5)
CASES: dict[str, tuple[lp.LookaheadConfig, lp.SamplingParams | None]] = {
    "greedy": (COMPUTE, None),
    "greedy, broadcast": (BROADCAST, None),
    "greedy, adaptive": (ADAPTIVE, None),
    "T=0.8": (COMPUTE, lp.SamplingParams(temperature=0.8, seed=3)),
    "top-p": (BROADCAST, lp.SamplingParams(temperature=0.8, top_p=0.8, seed=3)),
    "repetition penalty": (COMPUTE, lp.SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=3)),
}


def model_of(arch: str) -> Any:
    """The whole model, on every rank the same."""
    return tiny_model(arch, sharpness=2.5)


class Calls:
    """Counts the collectives of every step, by name and ranks in the group."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self.now: dict[str, int] = {}
        self.gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        self.own = {name: getattr(dist, name) for name in ("all_reduce", self.gather)}

    def __enter__(self) -> Calls:
        for name in self.own:
            setattr(dist, name, self._counted(name))
        return self

    def __exit__(self, *exc: object) -> None:
        for name, function in self.own.items():
            setattr(dist, name, function)

    def _counted(self, name: str) -> Any:
        short = name.removesuffix("_single").removesuffix("_into_tensor")

        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            key = f"{short} {'|'.join(map(str, dist.get_process_group_ranks(group)))}"
            self.now[key] = self.now.get(key, 0) + 1
            return self.own[name](*args, group=group, **kwargs)

        return call

    def on_tokens(self, tokens: list[int], step: int) -> None:
        """Note the collectives of the step that has ended; `generate` calls it."""
        self.steps.append(self.now)
        self.now = {}


def decode(folder: Path, archs: list[str], context: lp.ParallelContext) -> None:
    found: dict[str, Any] = {}
    for arch in archs:
        part = divide(model_of(arch), context.replica)
        found[arch] = {"held": sum(each.numel() for each in part.parameters())}
        for case, (config, sampling) in CASES.items():
            decoder = lp.LookaheadDecoder(part, config, context, step_times=TIMES)
            with Calls() as calls:
                output = decoder.generate(IDS, NEW, sampling, on_tokens=calls.on_tokens)
            found[arch][case] = {"tokens": output.tokens, "calls": calls.steps[1:]}
        plain = lp.PlainDecoder(part, context), lp.AutoregressiveDecoder(part, context)
        found[arch]["plain"] = [decoder.generate(IDS, NEW).tokens for decoder in plain]
    (folder / f"{context.rank}.json").write_text(json.dumps(found))


def bitwise(folder: Path, context: lp.ParallelContext) -> None:
    """Whether logits are plain decoding's in the mode that promises it, and in the usual one."""
    found: dict[str, Any] = {}
    for arch, dtype in (("llama", torch.float32), ("mixtral", torch.bfloat16)):
        part = divide(tiny_model(arch, dtype=dtype, sharpness=2.0), context.replica)
        plain = lp.PlainDecoder(part, context, exact="bitwise")
        of_mode: dict[str, Any] = {"bitwise": [], "tokens": [], "texts": []}
        for sampling in (None, lp.SamplingParams(temperature=0.8, seed=3)):
            how: dict[str, Any] = {"sampling": sampling, "eos_token_id": (), "output_logits": True}
            expected = plain.generate(IDS, NEW // 2, **how)
            for exact in ("bitwise", "tokens"):
                output = lp.LookaheadDecoder(part, COMPUTE, context, exact=exact).generate(IDS, NEW // 2, **how)
                assert output.logits is not None and expected.logits is not None
                of_mode[exact].append(torch.equal(output.logits, expected.logits))
            of_mode["texts"].append(expected.tokens)
        found[arch] = of_mode
    (folder / f"{context.rank}.json").write_text(json.dumps(found))


def endless(folder: Path, context: lp.ParallelContext) -> None:
    """Decode into a journal until a rank is killed."""
    part = divide(tiny_model("llama", max_position_embeddings=100_000), context.replica)
    decoder = lp.LookaheadDecoder(part, COMPUTE, context)
    journal = Journal(folder / "journal.jsonl", context)

    def on_tokens(tokens: list[int], step: int) -> None:
        if step == 5:
            (folder / f"{context.rank}.pid").write_text(str(os.getpid()))

    journal.generate(decoder, IDS, 90_000, None, on_tokens=on_tokens)


def main(folder: Path, tp: int, what: list[str]) -> None:
    torch.set_num_threads(1)
    context = lp.ParallelContext.from_env(tp=tp, timeout_s=60)
    if what == ["endless"]:
        endless(folder, context)
    elif what == ["bitwise"]:
        bitwise(folder, context)
    else:
        decode(folder, what, context)
    context.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
