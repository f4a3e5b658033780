"""The paper's scaling figure: S by log2 of the step tokens for N = 3..8, with its analytic model fitted, and ours.

    python scripts/tables.py scaling_law results.jsonl figure.png --task data/humaneval.jsonl --limit 4

The paper's method runs with W = G (lookahead_paper), ours without a window at the same step tokens. Each line of the
file is one setting on all prompts; what it has is not run again. S does not depend on the machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lp
from launch.bench.plots import LEGEND, figure, look

from ._common import (
    add_model_arguments,
    add_prompt_arguments,
    append_result,
    load_model,
    load_prompts,
    progress,
    read_results,
    sampling_at,
)
from .parts.acceptance import AcceptanceModel, Observed

OURS = 0  # in place of N
Result = dict[str, Any]


def settings(ngrams: list[int], widths: list[int], guesses: list[int]) -> list[tuple[int, int]]:
    """(N, W) of the paper's method, then (OURS, G)."""
    return [(n, width) for n in ngrams for width in widths] + [(OURS, size) for size in guesses]


def measure(model: Any, setting: tuple[int, int], prompts: list[list[int]], args: argparse.Namespace) -> Result:
    """S and step tokens of one setting over all prompts."""
    n, size = setting
    config: lp.LookaheadConfig | lp.PaperConfig
    if n == OURS:
        config = lp.LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=size)
    else:
        config = lp.PaperConfig(window_size=size, ngram_size=n, guess_set_size=size)
    decoder = lp.LookaheadDecoder(model, config)
    sampling = sampling_at(args.temperature)
    outputs = [decoder.generate(ids, args.max_new_tokens, sampling, sequence=i) for i, ids in enumerate(prompts)]
    steps = sum(output.steps for output in outputs)
    step_tokens = sum(step.num_tokens for output in outputs for step in output.step_stats)
    tokens = sum(len(output.tokens) for output in outputs)
    return {"N": n, "size": size, "S": tokens / steps, "tokens_a_step": step_tokens / steps}


def plot(results: list[Result], path: Path, title: str) -> None:
    """Points as measured, lines of the model, a colour an N."""
    with figure(path, title, 3.4) as (drawn, (axes,)):
        for index, n in enumerate(sorted({result["N"] for result in results} - {OURS})):
            sizes = sorted((r for r in results if r["N"] == n), key=lambda r: r["tokens_a_step"])
            model = AcceptanceModel.fitted(_observed(sizes))
            step_tokens = [result["tokens_a_step"] for result in sizes]
            points = look(index, f"N={n}: alpha {model.alpha:.2f}, f {model.f:.1f}")
            axes.plot(step_tokens, [result["S"] for result in sizes], **points | {"linestyle": "none"})
            axes.plot(step_tokens, [model.compression(r["size"], n - 1) for r in sizes], color=points["color"])
        ours = sorted((r for r in results if r["N"] == OURS), key=lambda r: r["tokens_a_step"])
        if ours:
            line = look(7, "the pool, no window") | {"marker": "*"}
            axes.plot([r["tokens_a_step"] for r in ours], [r["S"] for r in ours], **line)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set(xlabel="tokens a step (log scale)", ylabel="S (generated tokens a step)")
        drawn.legend(**LEGEND)


def _observed(results: list[Result]) -> list[Observed]:
    return [Observed(drafts=r["size"], depth=r["N"] - 1, compression=r["S"]) for r in results]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="JSONL to write, or to go on with")
    parser.add_argument("figure", type=Path)
    add_prompt_arguments(parser, limit=4, max_new_tokens=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ngrams", type=int, nargs="+", default=[3, 4, 5, 6, 7, 8])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="W = G")
    parser.add_argument("--guesses", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128, 256], help="G of ours")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    loaded = load_model(args)
    prompts = [list(loaded.tokenizer(prompt.text)["input_ids"]) for prompt in load_prompts(args)]
    shared = {"model": args.model, "task": args.task.name if args.task else "builtin", "prompts": len(prompts)}
    shared |= {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    results = [result for result in read_results(args.results) if shared.items() <= result.items()]
    done = {(result["N"], result["size"]) for result in results}
    left = [setting for setting in settings(args.ngrams, args.widths, args.guesses) if setting not in done]
    for setting in progress(left, "settings"):
        results.append(measure(loaded.model, setting, prompts, args) | shared)
        append_result(args.results, results[-1])
    plot(results, args.figure, f"{args.model}, {len(prompts)} prompts, T = {args.temperature:g}")
    paper = _observed([result for result in results if result["N"] != OURS])
    model = AcceptanceModel.fitted(paper)
    print(f"all N: alpha {model.alpha:.3f}, f {model.f:.2f}, error of log S {model.error(paper):.3f}")
    for result in sorted(results, key=lambda r: (r["N"], r["tokens_a_step"])):
        name = f"N={result['N']} W=G={result['size']}" if result["N"] else f"ours G={result['size']}"
        print(f"{name:16} tokens a step {result['tokens_a_step']:6.1f} S {result['S']:.2f}")
