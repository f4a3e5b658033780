"""Texts that take steps together, beside transformers' batch, plain ones, and one by one: docs/experiments/batches.md.

python scripts/tables.py batches --texts 4,8 --temperatures 0,0.8 --task data/humaneval.jsonl

Prompts are cut to their last tokens, so that all have as many, and no text ends early. The methods run in turn; speeds
and ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

import lp
from launch.bench.summary import markdown
from lp.errors import UserError
from lp.models.loader import Loaded

from ._common import (
    add_model_arguments,
    add_prompt_arguments,
    by_commas,
    load_model,
    load_prompts,
    median_and_range,
    sampling_at,
)

OURS, PLAIN, SERIAL, TRANSFORMERS = "lookahead", "plain", "lookahead, one by one", "transformers"
HEADS = ("texts", "T", "S", *(f"{name}, tokens/s" for name in (OURS, PLAIN, SERIAL, TRANSFORMERS)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=by_commas(int), default=[4, 8], help="in a step, by commas")
    parser.add_argument("--temperatures", type=by_commas(float), default=[0.0, 0.8], help="by commas")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="of every prompt, its last ones")
    parser.add_argument("--rounds", type=int, default=5)
    add_prompt_arguments(parser, max_new_tokens=128)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    loaded = load_model(args)
    texts = (list(loaded.tokenizer(prompt.text)["input_ids"]) for prompt in load_prompts(args))
    prompts = [ids[-args.prompt_tokens :] for ids in texts if len(ids) >= args.prompt_tokens]
    if len(prompts) < max(args.texts):
        raise UserError(
            f"{len(prompts)} prompts have {args.prompt_tokens} tokens, but --texts is {max(args.texts)}; give a larger "
            "--task, or fewer --prompt-tokens"
        )
    lines, figures = [], []
    for temperature in args.temperatures:
        for count in args.texts:
            methods = _methods(loaded, prompts[:count], args.max_new_tokens, temperature)
            outputs = methods[OURS]()
            compression = sum(len(output.tokens) for output in outputs) / sum(output.steps for output in outputs)
            speeds = _speeds(methods, count * args.max_new_tokens, args.rounds)
            ratios = {
                name: median(ours / other for ours, other in zip(speeds[OURS], each, strict=True))
                for name, each in speeds.items()
            }
            cells = [median_and_range(speeds[name]) + f", {ratios[name]:.2f} x" * (name != OURS) for name in methods]
            lines.append([str(count), f"{temperature:g}", f"{compression:.2f}", *cells])
            figures.append({"texts": count, "temperature": temperature, "speeds": speeds, "ratios": ratios})
    print(
        f"{args.model}, {args.dtype}, {args.threads} thread(s), {args.max_new_tokens} new tokens behind "
        f"{args.prompt_tokens}, medians of {args.rounds} rounds (least to most); x is how many times "
        "as fast lookahead's batch is"
    )
    print(markdown(HEADS, lines))
    print(json.dumps({"model": args.model, "torch": torch.__version__, "figures": figures}))


def _methods(
    loaded: Loaded, prompts: list[list[int]], new: int, temperature: float
) -> dict[str, Callable[[], list[lp.GenerationOutput]]]:
    sampling = sampling_at(temperature)
    lookahead, plain = lp.LookaheadDecoder(loaded.model), lp.PlainDecoder(loaded.model)

    def batch(decoder: lp.LookaheadDecoder | lp.PlainDecoder) -> list[lp.GenerationOutput]:
        return decoder.generate_batch(prompts, new, sampling, eos_token_id=(), max_sequences=len(prompts))

    def one_by_one() -> list[lp.GenerationOutput]:
        return [
            lookahead.generate(ids, new, sampling, eos_token_id=(), sequence=index) for index, ids in enumerate(prompts)
        ]

    def transformers() -> list[lp.GenerationOutput]:
        ids = torch.tensor(prompts, device=loaded.model.device)
        ends = {"min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **ends, **sampled)
        return []

    return {
        OURS: lambda: batch(lookahead),
        PLAIN: lambda: batch(plain),
        SERIAL: one_by_one,
        TRANSFORMERS: transformers,
    }


def _speeds(methods: Mapping[str, Callable[[], object]], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of every round, by method; one round more, before them, is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    for round_ in range(rounds + 1):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            if round_:
                speeds[name].append(tokens / (time.perf_counter() - start))
    return speeds
