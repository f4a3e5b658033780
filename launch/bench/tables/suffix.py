"""S and rows a step of suffix decoding by its settings, replayed on texts that a model wrote, without the model.

    python scripts/suffix_grid.py texts.jsonl --rows 50

The texts are those of scripts/texts.py: one object a line with task, index, temperature, prompt (ids), tokens (ids).
Prints a Markdown table a task and temperature, best first, then the same for all tasks together, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

from rich.progress import track

import lp
from launch.bench.replay import Replay, Text, load_texts, replay
from lp.draft.suffix import SuffixTree, native_tree

Group = tuple[str, float]  # task, temperature
Score = tuple[str, float, float]  # setting, S, rows a step


def settings(rows: int, factors: list[float], probabilities: list[float]) -> dict[str, lp.SuffixConfig]:
    """Paths and trees by name; `rows` a step at most, `c` included."""
    return {
        f"{'tree' if tree else 'path'}, factor {factor:g}, probability {probability:g}": lp.SuffixConfig(
            max_tokens=rows - 1, max_spec_factor=factor, min_token_prob=probability, tree=tree
        )
        for tree, factor, probability in product((False, True), factors, probabilities)
    }


def measure(texts: list[Text], configs: dict[str, lp.SuffixConfig]) -> dict[Group, list[Score]]:
    """The settings of every task and temperature, and of all tasks together, best first."""
    runs: dict[Group, dict[str, list[Replay]]] = defaultdict(lambda: defaultdict(list))
    for text in track(texts, "texts", disable=not sys.stderr.isatty()):
        for name, config in configs.items():
            run = replay(SuffixTree(config, text.prompt), text.prompt, text.tokens, config.max_tokens)
            for task in (text.task, "all tasks"):
                runs[task, text.temperature][name].append(run)
    return {group: ranked(by_name) for group, by_name in runs.items()}


def ranked(runs: dict[str, list[Replay]]) -> list[Score]:
    """S and rows a step over all texts of a setting, best S first."""
    scores = []
    for name, each in runs.items():
        steps = sum(run.steps for run in each)
        scores.append((name, sum(run.tokens for run in each) / steps, sum(run.slots for run in each) / steps))
    return sorted(scores, key=lambda score: -score[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="JSONL of texts")
    parser.add_argument("--rows", type=int, default=50, help="most rows a step, the last generated token's included")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 4.0, 8.0], help="max_spec_factor")
    parser.add_argument("--probabilities", type=float, nargs="+", default=[0.1, 0.02, 0.005], help="min_token_prob")
    args = parser.parse_args()
    try:
        native_tree()
        texts, configs = load_texts(args.path), settings(args.rows, args.factors, args.probabilities)
    except ValueError as error:
        parser.error(str(error))
    table = measure(texts, configs)
    tasks = list(dict.fromkeys(text.task for text in texts))
    order = sorted(table, key=lambda group: ([*tasks, "all tasks"].index(group[0]), group[1]))
    for task, temperature in order:
        mine = [text for text in texts if task in (text.task, "all tasks") and text.temperature == temperature]
        print(f"{task}, T = {temperature:g}: {len(mine)} texts, {sum(len(text.tokens) for text in mine)} tokens\n")
        print(f"| suffix tree, at most {args.rows} rows a step | S | rows a step |\n|---|---|---|")
        for name, compression, rows in table[task, temperature]:
            print(f"| {name} | {compression:.3f} | {rows:.1f} |")
        print()
    figures = [
        {"task": task, "temperature": t, "setting": name, "S": round(s, 4), "rows": round(rows, 2)}
        for task, t in order
        for name, s, rows in table[task, t]
    ]
    print(json.dumps({"rows": args.rows, "texts": len(texts), "results": figures}))


if __name__ == "__main__":
    main()
