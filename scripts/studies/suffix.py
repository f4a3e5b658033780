"""S and step tokens of suffix decoding by its settings, on replayed texts, without the model: docs/experiments/pool.md.

    python scripts/tables.py suffix texts.jsonl --num-tokens 50

The texts are those of `tables.py texts`: one object a line with task, index, temperature, prompt (ids), tokens (ids).
Prints a Markdown table a task and temperature, best first, then the same for all tasks together, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from itertools import product
from pathlib import Path

import lp
from launch.bench.summary import markdown
from lp.draft.suffix import SuffixTree, native_tree

from ._common import progress
from .parts.replay import Replay, Text, load_texts, replay

ALL_TASKS = "all tasks"
Group = tuple[str, float]  # task, temperature
Score = tuple[str, float, float]  # setting, S, tokens a step


def settings(num_tokens: int, factors: list[float], probabilities: list[float]) -> dict[str, lp.SuffixConfig]:
    """Paths and trees by name; `num_tokens` a step at most, the last generated one included."""
    return {
        f"{'tree' if tree else 'path'}, factor {factor:g}, probability {probability:g}": lp.SuffixConfig(
            max_tokens=num_tokens - 1, max_spec_factor=factor, min_token_prob=probability, tree=tree
        )
        for tree, factor, probability in product((False, True), factors, probabilities)
    }


def measure(texts: list[Text], configs: dict[str, lp.SuffixConfig]) -> dict[Group, list[Score]]:
    """The settings of every task and temperature, and of all tasks together, best first."""
    replays: dict[Group, dict[str, list[Replay]]] = defaultdict(lambda: defaultdict(list))
    for text in progress(texts, "texts"):
        for name, config in configs.items():
            result = replay(SuffixTree(config, text.prompt), text.prompt, text.tokens, config.max_tokens)
            for task in (text.task, ALL_TASKS):
                replays[task, text.temperature][name].append(result)
    return {group: ranked(by_name) for group, by_name in replays.items()}


def ranked(replays: dict[str, list[Replay]]) -> list[Score]:
    """S and tokens a step over all texts of a setting, best S first."""
    scores = []
    for name, results in replays.items():
        steps = sum(result.steps for result in results)
        tokens = sum(result.tokens for result in results)
        scores.append((name, tokens / steps, sum(result.step_tokens for result in results) / steps))
    return sorted(scores, key=lambda score: -score[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="JSONL of texts")
    parser.add_argument(
        "--num-tokens", type=int, default=50, help="most tokens a step, the last generated one included"
    )
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 4.0, 8.0], help="max_spec_factor")
    parser.add_argument("--probabilities", type=float, nargs="+", default=[0.1, 0.02, 0.005], help="min_token_prob")


def run(args: argparse.Namespace) -> None:
    native_tree()  # refused before the texts are read, where its package is not installed
    texts = load_texts(args.path)
    scores = measure(texts, settings(args.num_tokens, args.factors, args.probabilities))
    tasks = [*dict.fromkeys(text.task for text in texts), ALL_TASKS]
    groups = sorted(scores, key=lambda group: (tasks.index(group[0]), group[1]))
    figures = []
    for task, temperature in groups:
        of_group = [text for text in texts if task in (text.task, ALL_TASKS) and text.temperature == temperature]
        tokens = sum(len(text.tokens) for text in of_group)
        print(f"{task}, T = {temperature:g}: {len(of_group)} texts, {tokens} tokens\n")
        lines = [(name, f"{s:.3f}", f"{step_tokens:.1f}") for name, s, step_tokens in scores[task, temperature]]
        print(markdown((f"suffix tree, at most {args.num_tokens} tokens a step", "S", "tokens a step"), lines))
        for name, s, step_tokens in scores[task, temperature]:
            figure = {"task": task, "temperature": temperature, "setting": name}
            figures.append(figure | {"S": round(s, 4), "tokens_a_step": round(step_tokens, 2)})
    print(json.dumps({"num_tokens": args.num_tokens, "texts": len(texts), "results": figures}))
