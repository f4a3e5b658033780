"""Step time of models with recurrent layers, against the same with attention alone: docs/experiments/step-time.md.

python scripts/tables.py hybrid_steps --num-tokens 48 --hidden 512 --layers 8 --threads 1

Weights are random. Three of four layers are recurrent; the other model has attention in all of them. They take a step
of the same tree in turn. Shares are of the time that torch's profiler sees in operations.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PretrainedConfig

from launch.bench.summary import markdown
from lp.config import Capture
from lp.draft.layout import ancestors
from lp.models.runner import ModelRunner

SOLVE = "aten::linalg_solve_triangular"
PRODUCTS = "aten::mm"  # of weights: those of attention, states and trees are batched
VOCABULARY, HEAD_DIM = 2048, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-tokens", type=int, default=48, help="step tokens")
    parser.add_argument("--prefix", type=int, default=256, help="cached tokens")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8, help="a multiple of 4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    print(
        f"CPU, {args.threads} thread(s), float32, hidden size {args.hidden}, {args.layers} layers, "
        f"{args.num_tokens} step tokens behind {args.prefix}, medians"
    )
    figures = []
    lines = []
    for name, config_of in CONFIGS.items():
        hybrid, attention = (_model(config_of, args, only) for only in (False, True))
        steps = [_step(model, args) for model in (hybrid, attention)]
        hybrid_s, attention_s = _times(steps, args.rounds)
        shares = _shares(steps[0])
        solve, products = shares.get(SOLVE, 0.0), shares[PRODUCTS]
        sizes = [sum(each.numel() for each in model.parameters()) for model in (hybrid, attention)]
        figures.append({"model": name, "parameters": sizes, "hybrid_s": hybrid_s, "attention_s": attention_s})
        figures[-1] |= {"solve": solve, "products": products}
        millions = [f"{size / 1e6:.1f}" for size in sizes]
        times = [f"{1e3 * seconds:.1f}" for seconds in (hybrid_s, attention_s)]
        lines.append((name, *millions, *times, f"{hybrid_s / attention_s:.2f}", f"{solve:.1%}", f"{products:.0%}"))
    columns = ("model", "parameters, M", "attention alone, M", "step, ms", "attention alone, ms", "ratio")
    print(markdown((*columns, "the triangular solve", "products with weights"), lines))
    print(json.dumps({"settings": vars(args), "figures": figures}))


def _sizes(args: argparse.Namespace) -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": args.hidden, "intermediate_size": 3 * args.hidden}
    heads = {
        "num_attention_heads": args.hidden // HEAD_DIM,
        "num_key_value_heads": max(args.hidden // HEAD_DIM // 4, 1),
    }
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return sizes | heads | tokens | {"num_hidden_layers": args.layers, "tie_word_embeddings": True}


def _qwen3_5(args: argparse.Namespace, kinds: list[str]) -> PretrainedConfig:
    heads = args.hidden // HEAD_DIM
    return transformers.Qwen3_5TextConfig(
        **_sizes(args),
        head_dim=HEAD_DIM,
        linear_num_value_heads=heads,
        linear_num_key_heads=max(heads // 2, 1),
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        layer_types=["linear_attention" if kind == "recurrent" else "full_attention" for kind in kinds],
    )


def _granitemoehybrid(args: argparse.Namespace, kinds: list[str]) -> PretrainedConfig:
    return transformers.GraniteMoeHybridConfig(
        **_sizes(args),
        num_local_experts=0,
        shared_intermediate_size=3 * args.hidden,
        mamba_n_heads=2 * args.hidden // HEAD_DIM,
        mamba_d_head=HEAD_DIM,
        mamba_d_state=64,
        mamba_n_groups=1,
        position_embedding_type="rope",
        layer_types=["mamba" if kind == "recurrent" else "attention" for kind in kinds],
    )


def _lfm2(args: argparse.Namespace, kinds: list[str]) -> PretrainedConfig:
    return transformers.Lfm2Config(
        **_sizes(args), layer_types=["conv" if kind == "recurrent" else "full_attention" for kind in kinds]
    )


CONFIGS: dict[str, Callable[[argparse.Namespace, list[str]], PretrainedConfig]] = {
    "qwen3_5, gated delta rule": _qwen3_5,
    "granitemoehybrid, Mamba-2": _granitemoehybrid,
    "lfm2, short convolutions": _lfm2,
}


def _model(config_of: Callable[..., PretrainedConfig], args: argparse.Namespace, attention_alone: bool) -> Any:
    kinds = ["attention" if attention_alone or layer % 4 == 3 else "recurrent" for layer in range(args.layers)]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(args, kinds)).eval()


def _step(model: Any, args: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """A step of a drawn tree behind a prefix, again and again."""
    runner = ModelRunner(model, capture=Capture.OFF)
    cache = runner.new_cache(args.prefix + args.num_tokens)
    with torch.inference_mode():
        runner.prefill(range(args.prefix), cache, 512)
    rng = random.Random(0)
    visible = ancestors([-1, *(rng.randrange(max(0, node - 6), node) for node in range(1, args.num_tokens))])
    positions = args.prefix + visible.sum(1) - 1
    tokens = [*range(args.num_tokens)]
    return lambda: runner.forward(tokens, positions, visible, cache, tokens, capture=False)


@torch.inference_mode()
def _times(steps: list[Callable[[], torch.Tensor]], rounds: int) -> tuple[float, float]:
    """Median seconds of both, a step of each in turn."""
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 2):  # two to warm up
        for step, times in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step()
            if number >= 2:
                times.append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


@torch.inference_mode()
def _shares(step: Callable[[], torch.Tensor]) -> dict[str, float]:
    """The share of each operation in a step, the operations within it included."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(5):
            step()
    operations = profiled.key_averages()
    total = sum(each.self_cpu_time_total for each in operations)
    return {each.key: each.cpu_time_total / total for each in operations}
