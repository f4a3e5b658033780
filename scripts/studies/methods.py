"""Tokens a second of the adaptive decoder beside its peers, in alternation, resumable: docs/experiments/budget.md.

    python scripts/tables.py methods results.jsonl --tasks data/humaneval.jsonl data/gsm8k.jsonl --limit 10

Each line of the file is one prompt at one temperature: seconds, tokens and steps of every method. A run stops after
`--seconds` and goes on from the file when started again with the same settings; `--report` only prints. Rates are
tokens over seconds of all prompts; behind them the median over prompts of the adaptive decoder's rate to that method's,
and the least and most. Prefill included.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lp
from launch.bench.summary import markdown
from launch.config.builders import ORACLE, PLAIN
from launch.data.prompts import load_jsonl
from lp.errors import UserError

from ._common import add_model_arguments, append_result, load_model, median_and_range, read_results, sampling_at

DEFAULT = "adaptive"
# (prompt ids, new tokens, temperature, index of the prompt) -> (tokens, steps)
Run = Callable[[list[int], int, float, int], tuple[list[int], int]]
Job = tuple[int, str, str, float]  # index, task, prompt, temperature


def by_transformers(model: Any, **options: Any) -> Run:
    """transformers' own `generate`: greedy or sampled, or with its prompt lookup."""

    def run(ids: list[int], new: int, temperature: float, index: int) -> tuple[list[int], int]:
        torch.manual_seed(index)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        output = model.generate(prompt, attention_mask=mask, max_new_tokens=new, **sampling, **options)
        return output[0, len(ids) :].tolist(), 0

    return run


def by_decoder(decoder: lp.Decoder) -> Run:
    """One of lp's decoders."""

    def run(ids: list[int], new: int, temperature: float, index: int) -> tuple[list[int], int]:
        output = decoder.generate(ids, new, sampling_at(temperature), sequence=index)
        return output.tokens, output.steps

    return run


def methods(model: Any, fixed: list[str], only: list[str]) -> dict[str, Run]:
    """All that run here, or the adaptive decoder and those named in `only`; and `fixed`, settings as W,N,G,depth."""
    model.generation_config.pad_token_id = model.generation_config.pad_token_id or 0
    runs: dict[str, Run] = {
        DEFAULT: by_decoder(lp.LookaheadDecoder(model)),
        PLAIN: by_decoder(lp.PlainDecoder(model)),
        ORACLE: by_decoder(lp.AutoregressiveDecoder(model)),
        "generate": by_transformers(model),
        "generate, lookup 3": by_transformers(model, prompt_lookup_num_tokens=3),
        "generate, lookup 10": by_transformers(model, prompt_lookup_num_tokens=10),
        "prompt lookup": by_decoder(lp.LookaheadDecoder(model, lp.PromptLookupConfig())),
        "token recycling": by_decoder(lp.LookaheadDecoder(model, lp.RecyclingConfig())),
    }
    try:
        runs["suffix"] = by_decoder(lp.LookaheadDecoder(model, lp.SuffixConfig()))
    except UserError as error:  # its package is not installed
        print(error)
    runs = {name: run for name, run in runs.items() if name == DEFAULT or name in (only or runs)}
    for setting in fixed:
        w, n, g, depth = map(int, setting.split(","))
        config = lp.LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=g, draft_depth=depth)
        runs[f"W={w} N={n} G={g} depth={depth}"] = by_decoder(lp.LookaheadDecoder(model, config))
    return runs


def measure(runs: dict[str, Run], ids: list[int], new: int, temperature: float, index: int) -> dict[str, Any]:
    """One prompt: every method once, beginning with another one each time."""
    names = list(runs)
    texts: dict[str, list[int]] = {}
    results: dict[str, dict[str, Any]] = {}
    for name in names[index % len(names) :] + names[: index % len(names)]:
        start = time.perf_counter()
        texts[name], steps = runs[name](ids, new, temperature, index)
        results[name] = {"seconds": time.perf_counter() - start, "tokens": len(texts[name]), "steps": steps}
    if ORACLE in texts:
        for name, text in texts.items():
            results[name]["equal"] = text == texts[ORACLE]
    return results


def report(lines: list[dict[str, Any]]) -> None:
    """A table a temperature."""
    groups: dict[tuple[float, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["temperature"], line["task"]].append(line["methods"])
    for temperature in sorted({temperature for temperature, _ in groups}):
        tasks = sorted(task for t, task in groups if t == temperature)
        counts = ", ".join(f"{task} {len(groups[temperature, task])}" for task in tasks)
        print(f"\nT = {temperature:g}, prompts: {counts}")
        names = dict.fromkeys(name for task in tasks for prompt in groups[temperature, task] for name in prompt)
        cells = [[name, *(_cell(groups[temperature, task], name) for task in tasks)] for name in names]
        print(markdown(("method", *tasks), cells))
    equal = [
        result["equal"]
        for line in lines
        for name, result in line["methods"].items()
        if not name.startswith("generate") and "equal" in result
    ]
    print(f"\n{equal.count(False)} of {len(equal)} texts of lp's decoders are not plain decoding's")


def _cell(prompts: list[dict[str, Any]], name: str) -> str:
    """Rate of a method over the prompts that it ran on, and the adaptive decoder's rate to it."""
    prompts = [prompt for prompt in prompts if name in prompt]
    if not prompts:
        return "-"
    total = sum(prompt[name]["tokens"] for prompt in prompts) / sum(prompt[name]["seconds"] for prompt in prompts)
    ratios = [_rate(prompt[DEFAULT]) / _rate(prompt[name]) for prompt in prompts]
    return f"{total:.0f}, {median_and_range(ratios, 2)}"


def _rate(result: dict[str, Any]) -> float:
    return result["tokens"] / result["seconds"]


def jobs(args: argparse.Namespace, done: set[tuple[str, int, float]]) -> list[Job]:
    """What is left, tasks and temperatures in turn."""
    left = [
        (index, task.stem, prompt.text, temperature)
        for task in args.tasks
        for index, prompt in enumerate(load_jsonl(task, args.limit))
        for temperature in args.temperatures
        if (task.stem, index, temperature) not in done
    ]
    return sorted(left, key=lambda job: job[0])


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What every line of a file shares."""
    names = ("model", "dtype", "threads", "max_new_tokens", "fixed", "only")
    return {name: getattr(args, name) for name in names}


def check_same(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Refuse a file of other settings, whose figures would pass for those of this run.

    Raises:
        ValueError: names the setting that differs.
    """
    for line in results:
        for name, value in settings_of(args).items():
            if name not in line or line[name] != value:
                found = repr(line[name]) if name in line else "unknown"
                raise UserError(
                    f"{args.results} has lines of which {name} is {found}, and this run has {value!r}; give another "
                    "file, or --report to print it"
                )


def measure_all(args: argparse.Namespace, left: list[Job]) -> None:
    """Measure until the time is up."""
    loaded = load_model(args)
    runs = methods(loaded.model, args.fixed, args.only)
    end = time.monotonic() + args.seconds
    print(lp.LookaheadDecoder(loaded.model).explain().splitlines()[0])
    for run in runs.values():
        for temperature in args.temperatures:
            run(list(range(50, 90)), 8, temperature, 0)
    for index, task, prompt, temperature in left:
        if time.monotonic() > end:
            break
        ids = list(loaded.tokenizer(prompt)["input_ids"])
        results = measure(runs, ids, args.max_new_tokens, temperature, index)
        line = {"task": task, "index": index, "temperature": temperature, **settings_of(args), "methods": results}
        append_result(args.results, line)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="JSONL to write, or to go on with")
    parser.add_argument("--tasks", type=Path, nargs="+", default=[], help="JSONL of prompts")
    parser.add_argument("--limit", type=int, default=10, help="first prompts of every task")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--fixed", nargs="*", default=[], help="fixed settings beside the default, as W,N,G,depth")
    parser.add_argument("--only", nargs="*", default=[], help="methods beside the default, as the tables name them")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--report", action="store_true", help="print what the file has")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    results = read_results(args.results)
    if args.tasks and not args.report:
        check_same(results, args)
    left = jobs(args, {(line["task"], line["index"], line["temperature"]) for line in results})
    if left and not args.report:
        measure_all(args, left)
    if not args.results.exists():
        raise UserError(f"{args.results} does not exist, and nothing was measured; give --tasks, without --report")
    report(read_results(args.results))
    print(f"{len(left)} prompts were left before this run")
