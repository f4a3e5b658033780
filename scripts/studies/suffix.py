"""S and step tokens of suffix decoding by its settings, on replayed texts, without the model.

    python scripts/tables.py suffix texts.jsonl --num-tokens 50

The texts are those of `tables.py texts`: one object a line with task, index, temperature, prompt (ids), tokens (ids).
Prints a table for each task and temperature, best first, then the same for all tasks together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lp
from lp.draft.suffix import SuffixTree, native_tree

from .harness import Method, Result, Row, Study, Table, compression, grouped, option, step_tokens, total
from .parts.replay import load_texts, replay

ALL_TASKS = "all tasks"


def configs(num_tokens: int, factors: list[float], probabilities: list[float]) -> dict[str, lp.SuffixConfig]:
    """Paths and trees by name; `num_tokens` a step at most, the last generated one included."""
    return {
        f"{'tree' if tree else 'path'}, factor {factor:g}, probability {probability:g}": lp.SuffixConfig(
            max_tokens=num_tokens - 1, max_spec_factor=factor, min_token_prob=probability, tree=tree
        )
        for tree, factor, probability in product((False, True), factors, probabilities)
    }


@dataclass(kw_only=True)
class Suffix(Study):
    """Replays known texts under each setting of suffix decoding, and counts the steps."""

    path: Path = option(help="JSONL of tables.py texts")
    num_tokens: int = option(50, "most tokens a step, the last generated one included")
    factors: list[float] = option([1.0, 4.0, 8.0], "max_spec_factor")
    probabilities: list[float] = option([0.1, 0.02, 0.005], "min_token_prob")

    def shared(self) -> dict[str, Any]:
        return {"most_tokens": self.num_tokens}  # num_tokens of a result is what all steps had

    def rows(self) -> Iterable[Row]:
        native_tree()  # refused before the texts are read, where its package is not installed
        return [text.row for text in load_texts(self.path)]

    def methods(self) -> Mapping[str, Method]:
        found = configs(self.num_tokens, self.factors, self.probabilities)
        return {name: partial(measure, config) for name, config in found.items()}

    def tables(self, results: list[Result]) -> Iterable[Table]:
        tasks = [*grouped(results, "task"), ALL_TASKS]
        everything = [*results, *(result | {"task": ALL_TASKS} for result in results)]
        groups = grouped(everything, "task", "temperature")
        for task, temperature in sorted(groups, key=lambda group: (tasks.index(group[0]), group[1])):
            by_setting = grouped(groups[task, temperature], "method")
            ranked = sorted(by_setting.items(), key=lambda named: -compression(named[1]))
            lines = [(name, f"{compression(of):.3f}", f"{step_tokens(of):.1f}") for name, of in ranked]
            texts = next(iter(by_setting.values()))
            title = f"{task}, T = {temperature:g}: {len(texts)} texts, {total(texts, 'tokens')} tokens"
            heads = (f"suffix tree, at most {self.num_tokens} tokens a step", "S", "tokens a step")
            yield Table(heads, lines, title)


def measure(config: lp.SuffixConfig, row: Row) -> Result:
    """Replay one text under one setting: its tokens, steps and step tokens."""
    text = row.item
    found = replay(SuffixTree(config, text.prompt), text.prompt, text.tokens, config.max_tokens)
    return {"tokens": found.tokens, "steps": found.steps, "num_tokens": found.step_tokens}
