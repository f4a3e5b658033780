"""A rank that decodes with models split over all ranks, and writes down what came out and what it holds.

torchrun ... -m tests.support.workers.shards FOLDER BASELINE...     # -> FOLDER/rank.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import lp
from launch.bench.baselines import BASELINES, BaselineOptions
from tests.support.tiny_models import tiny_model

IDS, NEW = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], 24
ARCHITECTURES = ["llama", "qwen2", "llama_tied"]
SAMPLING = [None, lp.SamplingParams(temperature=0.8, seed=3)]


def split_model(arch: str) -> PreTrainedModel:
    """The model by this name, whole."""
    tied = {"tie_word_embeddings": True} if arch.endswith("_tied") else {}
    return tiny_model(arch.removesuffix("_tied"), dtype=torch.float32, **tied)


def without_compiled_collectives() -> None:
    """DeepSpeed compiles a shared-memory all-reduce at its first use, over a minute; without it, it takes gloo's."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def measure(baseline: str, arch: str, context: lp.ParallelContext) -> dict[str, Any]:
    model = split_model(arch).to(context.device)
    decoder = BASELINES[baseline].build(model, context, BaselineOptions())
    tokens = [decoder.generate(IDS, NEW, sampling).tokens for sampling in SAMPLING]
    held = [getattr(p, "to_local", lambda p=p: p)().numel() for p in decoder.model.parameters()]
    return {"tokens": tokens, "held": sum(held), "whole": sum(p.numel() for p in model.parameters())}


def main(folder: Path, baselines: list[str]) -> None:
    torch.set_num_threads(1)
    context = lp.ParallelContext.from_env()
    if "deepspeed_tp" in baselines:
        without_compiled_collectives()
    found = {name: {arch: measure(name, arch, context) for arch in ARCHITECTURES} for name in baselines}
    (folder / f"{context.rank}.json").write_text(json.dumps(found))
    context.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
