"""Tokens a second of the default (adaptive) decoder beside its peers, in alternation, prompt by prompt, resumable.

    python scripts/adaptive.py results.jsonl --tasks data/humaneval.jsonl data/gsm8k.jsonl --limit 10 --seconds 200

Each line of the file is one prompt with one temperature: seconds, tokens and steps of every method. A run stops after
`--seconds` and goes on from the file when started again; `--report` only prints. Rates are tokens over seconds of all
prompts; the ratio in brackets is the median over prompts of the default's rate to that method's. Prefill included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lp
from launch.bench.prompts import load_jsonl
from lp.models.loader import Loaded, load

DEFAULT, PLAIN = "adaptive", "plain"
Run = Callable[[list[int], int, float, int], tuple[list[int], int]]


def by_transformers(model: Any, **options: Any) -> Run:
    """transformers' own `generate`: greedy or sampled, or with its prompt lookup."""

    def run(ids: list[int], new: int, temperature: float, index: int) -> tuple[list[int], int]:
        torch.manual_seed(index)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        given = torch.tensor([ids])
        mask = torch.ones_like(given)
        output = model.generate(given, attention_mask=mask, max_new_tokens=new, **sampling, **options)
        return output[0, len(ids) :].tolist(), 0

    return run


def by_decoder(decoder: Any) -> Run:
    """One of lp's."""

    def run(ids: list[int], new: int, temperature: float, index: int) -> tuple[list[int], int]:
        sampling = lp.SamplingParams(temperature=temperature, seed=0) if temperature else None
        output = decoder.generate(ids, new, sampling, sequence=index)
        return output.tokens, output.steps

    return run


def methods(model: Any, fixed: list[str], only: list[str]) -> dict[str, Run]:
    """All that run here, or the default and these; `fixed` are settings as W,N,G,depth."""
    model.generation_config.pad_token_id = model.generation_config.pad_token_id or 0
    made: dict[str, Run] = {
        DEFAULT: by_decoder(lp.LookaheadDecoder(model)),
        PLAIN: by_decoder(lp.AutoregressiveDecoder(model)),
        "generate": by_transformers(model),
        "generate, lookup 3": by_transformers(model, prompt_lookup_num_tokens=3),
        "generate, lookup 10": by_transformers(model, prompt_lookup_num_tokens=10),
        "prompt lookup": by_decoder(lp.LookaheadDecoder(model, lp.PromptLookupConfig())),
        "token recycling": by_decoder(lp.LookaheadDecoder(model, lp.RecyclingConfig())),
    }
    try:
        made["suffix"] = by_decoder(lp.LookaheadDecoder(model, lp.SuffixConfig()))
    except ValueError as error:
        print(error)
    for setting in fixed:
        w, n, g, depth = map(int, setting.split(","))
        config = lp.LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=g, draft_depth=depth)
        made[f"W={w} N={n} G={g} depth={depth}"] = by_decoder(lp.LookaheadDecoder(model, config))
    return {name: run for name, run in made.items() if name == DEFAULT or name in (only or made)}


def measure(made: dict[str, Run], ids: list[int], new: int, temperature: float, index: int) -> dict[str, Any]:
    """One prompt: every method once, beginning with another one each time."""
    names, taken = list(made), dict[str, dict[str, Any]]()
    for name in names[index % len(names) :] + names[: index % len(names)]:
        start = time.perf_counter()
        tokens, steps = made[name](ids, new, temperature, index)
        taken[name] = {"seconds": time.perf_counter() - start, "tokens": len(tokens), "steps": steps, "text": tokens}
    texts = {name: result.pop("text") for name, result in taken.items()}
    for name, text in texts.items():
        if PLAIN in texts:
            taken[name]["equal"] = text == texts[PLAIN]
    return taken


def report(lines: list[dict[str, Any]]) -> None:
    """A table a temperature."""
    groups: dict[tuple[float, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["temperature"], line["task"]].append(line["methods"])
    for temperature in sorted({temperature for temperature, _ in groups}):
        tasks = sorted(task for t, task in groups if t == temperature)
        print(
            f"\nT = {temperature:g}, prompts: "
            + ", ".join(f"{task} {len(groups[temperature, task])}" for task in tasks)
        )
        print("| method | " + " | ".join(tasks) + " |\n|---" + "|---" * len(tasks) + "|")
        for name in dict.fromkeys(name for task in tasks for run in groups[temperature, task] for name in run):
            cells = []
            for task in tasks:
                runs = [run for run in groups[temperature, task] if name in run]
                if not runs:
                    cells.append("-")
                    continue
                total = sum(run[name]["tokens"] for run in runs) / sum(run[name]["seconds"] for run in runs)
                rates = [_rate(run[DEFAULT]) / _rate(run[name]) for run in runs]
                cells.append(f"{total:.0f} ({statistics.median(rates):.2f})")
            print(f"| {name} | " + " | ".join(cells) + " |")
    ours = [run[name] for line in lines for run in [line["methods"]] for name in run if not name.startswith("generate")]
    equal = [run["equal"] for run in ours if "equal" in run]
    print(f"\n{equal.count(False)} of {len(equal)} texts of lp's decoders are not plain decoding's")


def _rate(run: dict[str, Any]) -> float:
    return run["tokens"] / run["seconds"]


def jobs(args: argparse.Namespace, done: set[tuple[str, int, float]]) -> list[tuple[int, str, str, float]]:
    """(index, task, prompt, temperature) of what is left, tasks and temperatures in turn."""
    wanted = [
        (index, task.stem, prompt.text, temperature)
        for task in args.tasks
        for index, prompt in enumerate(load_jsonl(task, args.limit))
        for temperature in args.temperatures
    ]
    return sorted((job for job in wanted if (job[1], job[0], job[3]) not in done), key=lambda job: job[0])


def run_all(args: argparse.Namespace, loaded: Loaded, left: list[tuple[int, str, str, float]]) -> None:
    """Measure until the time is up."""
    made, end = methods(loaded.model, args.fixed, args.only), time.monotonic() + args.seconds
    print(lp.LookaheadDecoder(loaded.model).explain().splitlines()[0])
    for run in made.values():
        for temperature in args.temperatures:
            run(list(range(50, 90)), 8, temperature, 0)
    for index, task, prompt, temperature in left:
        if time.monotonic() > end:
            break
        ids = list(loaded.tokenizer(prompt)["input_ids"])
        taken = measure(made, ids, args.max_new_tokens, temperature, index)
        line = {"task": task, "index": index, "temperature": temperature, "methods": taken}
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSONL to write, or to go on with")
    parser.add_argument("--tasks", type=Path, nargs="+", default=[], help="JSONL of prompts")
    parser.add_argument("--limit", type=int, default=10, help="first prompts of every task")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--fixed", nargs="*", default=[], help="fixed settings beside the default, as W,N,G,depth")
    parser.add_argument("--only", nargs="*", default=[], help="methods beside the default, as the tables name them")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--report", action="store_true", help="print what the file has")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    read = args.results.read_text(encoding="utf-8").splitlines() if args.results.exists() else []
    left = jobs(args, {(line["task"], line["index"], line["temperature"]) for line in map(json.loads, read)})
    if left and not args.report:
        run_all(args, load(args.model, args.dtype), left)
    if not args.results.exists():
        parser.error(f"{args.results} does not exist, and nothing was measured; give --tasks, without --report")
    report([json.loads(line) for line in args.results.read_text(encoding="utf-8").splitlines()])
    print(f"{len(left)} prompts were left before this run")


if __name__ == "__main__":
    main()
