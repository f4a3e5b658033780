"""S, step tokens and host time of the pool, its ablations and its peers, on replayed texts: docs/experiments/pool.md.

    python scripts/tables.py pool texts.jsonl results.jsonl --study equal_budget
    python scripts/tables.py pool texts.jsonl results.jsonl --study ablation --limit 20 --max-new-tokens 128 \
        --tasks humaneval mtbench

The texts are those of `tables.py texts`. One line of results a text and method, written as it is measured; what is
there already of the same model, --num-tokens and --max-new-tokens is not measured again, so a run may be interrupted,
and two may share the work by --part. Each result tells whether the tokens equal the text's.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lp
from launch.bench.summary import markdown

from ._common import (
    PAPER,
    add_model_arguments,
    append_result,
    budget_config,
    load_model,
    progress,
    read_results,
    sampling_at,
)
from .parts.replay import Text, load_texts

Build = Callable[[Any], lp.Decoder]
Result = dict[str, Any]


def lookahead(num_tokens: int, **switches: Any) -> Build:
    """The pool with this many tokens a step at most."""
    config = budget_config(num_tokens, **switches)
    return lambda model: lp.LookaheadDecoder(model, config)


def lookahead_window(num_tokens: int, window: int, ngram: int) -> Build:
    """The same with `window` x (`ngram` - 1) window nodes."""
    guesses = (num_tokens - max(window * (ngram - 1), 1)) // (ngram - 1)
    return lookahead(num_tokens, window_size=window, ngram_size=ngram, guess_set_size=guesses)


def paper(**switches: Any) -> Build:
    return lambda model: lp.LookaheadDecoder(model, lp.PaperConfig(**(PAPER | switches)))


def recycling(num_tokens: int) -> Build:
    return lambda model: lp.LookaheadDecoder(model, lp.RecyclingConfig(nodes=num_tokens - 1))


def equal_budget(num_tokens: int) -> dict[str, Build]:
    """The pool and token recycling with the step tokens of the paper's method."""
    return {
        "lookahead_paper": paper(),
        f"lookahead {num_tokens}": lookahead(num_tokens),
        f"token_recycling {num_tokens}": recycling(num_tokens),
    }


def scaling(num_tokens: int) -> dict[str, Build]:
    """S by step tokens."""
    return {f"lookahead {count}": lookahead(count) for count in (25, 100, 50, 200, 400)}


def without(switch: str) -> lp.Ablation:
    """All parts but this one."""
    values: dict[str, Any] = {switch: False}
    return lp.Ablation(**values)


def ablation(num_tokens: int) -> dict[str, Build]:
    """Every idea off, and other windows."""
    switches = ["prompt_ngrams", "prompt_logits", "output_ngrams", "window_ngrams", "position_guesses"]
    switches += ["renoise", "learn", "window_noise"]
    builds = {f"all, {num_tokens} tokens": lookahead(num_tokens)}
    builds |= {f"without {name}": lookahead(num_tokens, ablation=without(name)) for name in switches}
    no_text = lp.Ablation(prompt_ngrams=False, output_ngrams=False)
    builds["without text n-grams"] = lookahead(num_tokens, ablation=no_text)
    builds["without top-k logits"] = lookahead(num_tokens, ablation=lp.Ablation(num_logits=0))
    builds |= {f"K = {k}": lookahead(num_tokens, ablation=lp.Ablation(num_logits=k)) for k in (4, 32)}
    builds |= {f"depth {depth}": lookahead(num_tokens, draft_depth=depth) for depth in (4, 12)}
    windows = ((0, 2), (16, 2), (8, 3), (7, 5))
    builds |= {f"W = {w}, N = {n}": lookahead_window(num_tokens, w, n) for w, n in windows}
    return builds | {"lookahead_paper": paper(), "lookahead_paper, no text": paper(prompt_ngrams=False)}


STUDIES = {"equal_budget": equal_budget, "scaling": scaling, "ablation": ablation}


def measure(decoder: lp.Decoder, text: Text, name: str, max_new_tokens: int) -> Result:
    """One text by one method."""
    output = decoder.generate(text.prompt, max_new_tokens, sampling_at(text.temperature), sequence=text.index)
    steps = output.step_stats
    return {
        "method": name,
        "task": text.task,
        "index": text.index,
        "temperature": text.temperature,
        "tokens": len(output.tokens),
        "steps": output.steps,
        "num_tokens": sum(step.num_tokens for step in steps),
        "host_us": 1e6 * statistics.median(step.host_s for step in steps),
        "equal": output.tokens == text.tokens[:max_new_tokens],
    }


def print_table(results: list[Result], names: list[str]) -> None:
    """S @ tokens a step by task and temperature, a line a method."""
    groups: dict[tuple[str, float], dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        groups[result["task"], result["temperature"]][result["method"]].append(result)
    columns = sorted(groups)
    lines = []
    for name in names:
        by_column = [groups[column][name] for column in columns]
        host = [result["host_us"] for column in by_column for result in column]
        lines.append([name, *map(_cell, by_column), f"{statistics.median(host) if host else 0:.0f}"])
    heads = [f"{task}, T = {temperature:g}" for task, temperature in columns]
    print(markdown(("method", *heads, "host, us"), lines))
    differing = sum(not result["equal"] for result in results)
    print(f"\n{len(results)} results, {differing} of them with other tokens than plain decoding's")


def _cell(results: list[Result]) -> str:
    if not results:
        return ""
    tokens, steps, num_tokens = (sum(result[key] for result in results) for key in ("tokens", "steps", "num_tokens"))
    return f"{tokens / steps:.2f} @{num_tokens / steps:.0f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", type=Path)
    parser.add_argument("results", type=Path, help="JSONL to extend")
    parser.add_argument("--study", choices=sorted(STUDIES), default="equal_budget")
    parser.add_argument(
        "--num-tokens", type=int, default=46, help="most tokens a step, the last generated one included"
    )
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.8])
    parser.add_argument("--methods", nargs="+", help="names of the study's; all without it")
    parser.add_argument("--limit", type=int, default=80, help="texts of a task and temperature")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--part", default="0/1", help="I/N: take every Nth text from the Ith on")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    builds = STUDIES[args.study](args.num_tokens)
    names = args.methods or list(builds)
    texts = [
        text
        for text in load_texts(args.texts)
        if text.index < args.limit
        and text.temperature in args.temperatures
        and text.task in (args.tasks or [text.task])
    ]
    shared = {name: getattr(args, name) for name in ("model", "dtype", "max_new_tokens")}
    shared |= {"most_tokens": args.num_tokens}  # a step; num_tokens is what all steps had
    results = [result for result in read_results(args.results) if shared.items() <= result.items()]
    key_names = ("method", "task", "index", "temperature")
    done = {tuple(result[name] for name in key_names): result for result in results}
    part, parts = map(int, args.part.split("/"))
    model = load_model(args).model
    decoders = {name: builds[name](model) for name in names}
    for text in progress(texts[part::parts], "texts"):
        for name, decoder in decoders.items():
            key = (name, *text.key)
            if key not in done:
                done[key] = measure(decoder, text, name, args.max_new_tokens) | shared
                append_result(args.results, done[key])
    keys = {(name, *text.key) for name in names for text in texts}
    print_table([result for key, result in done.items() if key in keys], names)
