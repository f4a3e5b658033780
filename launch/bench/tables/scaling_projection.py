"""R GPUs over one, for a GPU nobody has run: step times by arithmetic, S and host time of the demo model here.

    python scripts/tables.py scaling_projection results.jsonl --data data --sets humaneval,gsm8k --figure figure.png
    python scripts/tables.py scaling_projection results.jsonl --gpu a100 --shape llama2_13b    # of the same runs

S comes from R ranks with B tokens each, run as threads. Host time and message size come from the same ranks run one at
a time on the first prompts (--timed): each step's slowest rank. The time of the gather is that of the links in
conf/scaling.yaml. Each line of the file is one number of ranks at one temperature; what it has is not run again.
docs/scaling.md is made of it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from omegaconf import OmegaConf

import lp
from lp.errors import UserError
from lp.models.loader import Loaded
from lp.parallel.thread_ranks import run_lockstep

from ...app import CONF
from ..arithmetic import GPUS, StepTime
from ..ceilings import Work
from ..gpu_projection import GpuLine, LogLaw
from ..plots import projection_plot
from ..projection import Link, Projection
from ..shapes import SHAPES, shape_config, sketch
from ..summary import markdown
from ._common import add_model_arguments, append_result, load_model, progress, read_results, sampling_at
from .shares_compression import decode_all, fixed_config, names, numbers, read_sets

Result = dict[str, Any]
NODE_GPUS = 8  # joined by the first link; more are joined by the second
LINKS = ("nvlink", "infiniband")
HEADS = (
    *("GPUs", "tokens a step", "S", "GPU ms", "host ms", "gather ms", "tokens/s", "over 1 GPU", "efficiency"),
    *("over its best 1 GPU", "over plain", "largest part of a step", "limited by"),
)


def measure(loaded: Loaded, sets: dict[str, list[list[int]]], setting: Result) -> Result:
    """S of one number of ranks at one temperature over all sets, and the host's part of their first prompts."""
    ranks, budget, temperature = setting["ranks"], setting["budget"], setting["temperature"]
    new, timed, rounds = setting["max_new_tokens"], setting["timed"], setting["rounds"]
    prompts = [ids for of_set in zip_longest(*sets.values()) for ids in of_set if ids]  # the first of every set first
    if budget == 1:
        plain = lp.PlainDecoder(loaded.model)
        outputs = [_decode(plain, ids, new, temperature, index) for index, ids in enumerate(prompts)]
        host_s = [step.host_s for output in outputs[:timed] for step in output.step_stats]
        payload_bytes = 0
    else:
        config = fixed_config(min(setting["window"], budget // 2), ranks, budget)
        outputs = run_lockstep(ranks, partial(decode_all, loaded, config, prompts, new, temperature))[0]
        host_s = []
        for index, ids in enumerate(prompts[:timed]):
            decode = partial(_decode, ids=ids, new=new, temperature=temperature, index=index)
            decoder = lp.LookaheadDecoder(loaded.model, config, capture="off")
            projection = Projection(decoder=decoder, decode=decode, ranks=ranks)
            host_s += projection.slowest_host_s([projection.run() for _ in range(rounds)])
            payload_bytes = projection.recorded.payload_bytes
    tokens = sum(len(output.tokens) for output in outputs)
    steps = sum(output.steps for output in outputs)
    return {"tokens": tokens, "steps": steps, "host_s": fmean(host_s), "payload_bytes": payload_bytes}


def _decode(decoder: Any, ids: list[int], new: int, temperature: float, index: int) -> lp.GenerationOutput:
    output: lp.GenerationOutput = decoder.generate(ids, new, sampling_at(temperature), sequence=index)
    return output


def project(result: Result, step_time: Callable[[int], StepTime], links: dict[str, Link]) -> GpuLine:
    """A line of the file, on GPUs with these step times."""
    link = links[LINKS[result["ranks"] > NODE_GPUS]]
    gather_s = link.all_gather_s(result["ranks"], result["payload_bytes"])
    return GpuLine(
        ranks=result["ranks"],
        budget=result["budget"],
        compression=result["tokens"] / result["steps"],
        parts=step_time(result["budget"]).parts | {"host": result["host_s"], "gather": gather_s},
    )


def cells(lines: Sequence[GpuLine], budget: int) -> list[list[str]]:
    """The table of one temperature: the ranks with this budget."""
    shown = sorted((line for line in lines if line.budget == budget), key=lambda line: line.ranks)
    one = next(line for line in shown if line.ranks == 1)
    plain = next(line for line in lines if line.budget == 1)
    best = max((line for line in lines if line.ranks == 1), key=lambda line: line.tokens_per_s)
    found = []
    for line, fewer in zip(shown, [None, *shown], strict=False):
        host_s, gather_s = line.parts["host"], line.parts["gather"]
        ratio = line.tokens_per_s / one.tokens_per_s
        row = [str(line.ranks), str(line.ranks * budget), f"{line.compression:.2f}"]
        row += [f"{1e3 * seconds:.2f}" for seconds in (line.step_s - host_s - gather_s, host_s, gather_s)]
        row += [f"{line.tokens_per_s:.0f}", f"{ratio:.2f} x", f"{ratio / line.ranks:.0%}"]
        row += [f"{line.tokens_per_s / other.tokens_per_s:.2f} x" for other in (best, plain)]
        found.append([*row, line.largest, line.limit(fewer)])
    return found


def integers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="JSONL to write, or to go on with")
    parser.add_argument("--figure", type=Path, help="PNG to draw")
    parser.add_argument("--gpu", choices=[*GPUS], default="h200")
    parser.add_argument("--shape", choices=[*SHAPES], default="llama2_7b", metavar="NAME", help="of conf's models")
    parser.add_argument("--prefix", type=int, default=1024, help="cached tokens")
    parser.add_argument("--ranks", type=integers, default=[1, 2, 4, 8, 16, 32, 64], help="by commas")
    parser.add_argument("--budget", type=int, default=64, help="B, step tokens of every rank")
    parser.add_argument("--alone", type=integers, default=[32, 128, 192], help="B that one GPU is tried with besides")
    parser.add_argument("--window", type=int, default=0, help="W, with N = 2; half of B at most")
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 0.8], help="by commas; 0 is greedy")
    parser.add_argument("--data", type=Path, help="folder of SET.jsonl; the built-in prompts without it")
    parser.add_argument("--sets", type=names, default=["humaneval", "classeval", "gsm8k", "mtbench"], help="by commas")
    parser.add_argument("--limit", type=int, default=4, help="first prompts of every set")
    parser.add_argument("--timed", type=int, default=1, help="prompts whose host time is measured")
    parser.add_argument("--rounds", type=int, default=3, help="of host times; the least counts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    add_model_arguments(parser)


def settings(args: argparse.Namespace) -> list[Result]:
    """Every run, the cheap ones first."""
    pairs = [(1, 1), *((1, budget) for budget in args.alone), *((ranks, args.budget) for ranks in args.ranks)]
    shared = {"model": args.model, "dtype": args.dtype, "threads": args.threads, "window": args.window}
    shared |= {"sets": args.sets if args.data else ["built-in"], "limit": args.limit, "timed": args.timed}
    shared |= {"rounds": args.rounds, "max_new_tokens": args.max_new_tokens}
    return [
        {"temperature": temperature, "ranks": ranks, "budget": budget} | shared
        for ranks, budget in sorted(dict.fromkeys(pairs))
        for temperature in args.temperatures
    ]


def run(args: argparse.Namespace) -> None:
    if 1 not in args.ranks or args.budget == 1:
        raise UserError("--ranks needs 1, which the others are compared with, and --budget 2 at least")
    asked = settings(args)
    done = read_results(args.results)
    left = [setting for setting in asked if not any(setting.items() <= result.items() for result in done)]
    loaded = load_model(args)
    sets = read_sets(args, loaded)
    for setting in progress(left, "settings"):
        append_result(args.results, setting | measure(loaded, sets, setting) | {"torch": torch.__version__})
    results = [
        result for result in read_results(args.results) for setting in asked if setting.items() <= result.items()
    ]
    links = {name: Link(**values) for name, values in OmegaConf.load(CONF / "scaling.yaml").links.items()}
    gpu = GPUS[args.gpu]
    config = shape_config(args.shape)
    work, layers = Work.of(sketch(config, "bfloat16")), config.num_hidden_layers
    step_time = partial(StepTime.of, gpu, work, layers, prefix=args.prefix)
    source = f"GPU by arithmetic: {gpu.name}, {args.shape}, bfloat16, {args.prefix} cached tokens. S and host time: "
    source += f"{args.model} model, one of {os.cpu_count()} CPU cores, W={args.window}. "
    source += f"Links: {LINKS[0]} up to {NODE_GPUS} GPUs, then {LINKS[1]}."
    series: dict[float, list[GpuLine]] = {}
    for temperature in args.temperatures:
        of_one = [result for result in results if result["temperature"] == temperature]
        lines = [project(result, step_time, links) for result in of_one]
        series[temperature] = [line for line in lines if line.budget == args.budget]
        print(f"T = {temperature:g}, B = {args.budget}. {source}\n")
        print(markdown(HEADS, cells(lines, args.budget)))
        alone = [line for line in lines if line.ranks == 1]
        speeds = ", ".join(f"{line.tokens_per_s:.0f} (B = {line.budget})" for line in alone)
        print(f"One GPU, tokens/s: {speeds}; B = 1 is plain decoding. {LogLaw.of(series[temperature])}\n")
    if args.figure:
        projection_plot(series, source, args.figure)
    figures = {temperature: [asdict(line) for line in lines] for temperature, lines in series.items()}
    print(json.dumps({"gpu": args.gpu, "shape": args.shape, "by_temperature": figures}))
