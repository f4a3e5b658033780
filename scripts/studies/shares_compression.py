"""S of R ranks with B tokens each against S of one rank with R x B.

    python scripts/tables.py shares_compression --data data --sets humaneval,gsm8k --ranks 8 --budget 64

The sets are JSONL files of prompts in the folder --data, the built-in prompts without it. Ranks are threads of this
process, so their speed says nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import lp
from launch.data.prompts import load_builtin, load_jsonl
from lp.errors import UserError
from lp.models.loader import context_limit
from lp.parallel.thread_ranks import run_lockstep

from .harness import Method, Result, Row, Table, TextStudy, compression, grouped, option, sampling_at, total

BUILTIN = "built-in"
ALL_SETS = "all sets"
RANKS, ONE = "ranks", "one"


def fixed_config(window: int, ranks: int, budget: int) -> lp.LookaheadConfig:
    """The config of ranks that each take exactly `budget` step tokens, with N = 2.

    Raises:
        ValueError: the window leaves no rank a draft token.
    """
    guesses = ranks * budget - max(window, 1) - (ranks - 1)
    if window > budget or guesses < 0:
        raise UserError(f"--budget {budget} has no room for --window {window}; give a larger budget")
    return lp.LookaheadConfig(window_size=window, ngram_size=2, guess_set_size=guesses)


@dataclass(kw_only=True)
class SetStudy(TextStudy):
    """A study of several sets of prompts."""

    data: Path | None = option(None, "folder of SET.jsonl; the built-in prompts without it")
    sets: str = option("humaneval,classeval,gsm8k,mtbench", "by commas")
    limit: int = option(16, "first prompts of every set")
    max_new_tokens: int = option(64)
    temperatures: list[float] = option([0.0, 0.3, 0.8], "0 is greedy")

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"sets": ",".join(self.set_names)}

    @property
    def set_names(self) -> list[str]:
        """The sets that are asked for."""
        return self.sets.split(",") if self.data else [BUILTIN]

    @cached_property
    def prompt_ids(self) -> dict[str, list[list[int]]]:
        """Token ids of the prompts by set; those that fill the context are left out."""
        most = context_limit(self.loaded.model)
        found: dict[str, list[list[int]]] = {}
        for name in self.set_names:
            prompts = load_jsonl(self.data / f"{name}.jsonl", self.limit) if self.data else load_builtin(self.limit)
            ids = [self.ids(prompt.text) for prompt in prompts]
            found[name] = [prompt for prompt in ids if most is None or len(prompt) < most]
            if left_out := len(ids) - len(found[name]):
                print(f"{name}: {left_out} prompts fill the context and are left out", file=sys.stderr)
        return {name: prompts for name, prompts in found.items() if prompts}


def decode_all(
    study: SetStudy,
    config: lp.LookaheadConfig,
    prompts: Iterable[tuple[int, list[int]]],
    temperature: float,
    context: lp.ParallelContext,
) -> list[lp.GenerationOutput]:
    """Decode all prompts on one rank, which takes part in the steps of all ranks.

    Args:
        study: has the model, and the number of tokens to generate.
        config: settings that the rank's decoder gets.
        prompts: numbers and token ids; the number of a prompt is its sequence, so that noise differs.
        temperature: temperature of sampling; 0 is greedy.
        context: which rank this is, and the collectives of all.
    """
    decoder = lp.LookaheadDecoder(study.loaded.model, config, context, capture="off")  # threads cannot capture
    sampling = sampling_at(temperature)
    return [decoder.generate(ids, study.max_new_tokens, sampling, sequence=index) for index, ids in prompts]


@dataclass(kw_only=True)
class SharesCompression(SetStudy):
    """Compares S of several ranks with S of one rank that computes as many tokens alone."""

    ranks: int = option(8, "R")
    budget: int = option(64, "B, step tokens of every rank")
    window: int = option(0, "W, with N = 2")
    SHARED = (*SetStudy.SHARED, "ranks", "budget", "window")

    def rows(self) -> Iterable[Row]:
        fixed_config(self.window, self.ranks, self.budget)  # refused before the model is loaded
        for temperature in self.temperatures:
            for name, prompts in self.prompt_ids.items():
                for index, ids in enumerate(prompts):
                    yield Row({"temperature": temperature, "set": name, "index": index}, ids)

    def methods(self) -> Mapping[str, Method]:
        shared = fixed_config(self.window, self.ranks, self.budget)
        alone = fixed_config(self.window, 1, self.ranks * self.budget)

        def decode(row: Row, config: lp.LookaheadConfig, context: lp.ParallelContext) -> lp.GenerationOutput:
            return decode_all(self, config, [(row.key["index"], row.item)], row.key["temperature"], context)[0]

        return {
            RANKS: lambda row: _counts(run_lockstep(self.ranks, lambda context: decode(row, shared, context))),
            ONE: lambda row: _counts([decode(row, alone, lp.ParallelContext())]),
        }

    def tables(self, results: list[Result]) -> Iterable[Table]:
        many = f"S of {self.ranks} ranks x {self.budget} tokens"
        one = f"S of one rank x {self.ranks * self.budget}"
        heads = ("set", "prompts", many, one, "ratio", "tokens of the largest rank a step", "texts that differ")
        for temperature, of in grouped(results, "temperature").items():
            by_set = grouped(of, "set")
            if len(by_set) > 1:
                by_set[ALL_SETS] = of
            yield Table(heads, [_cells(*each) for each in by_set.items()], f"T = {temperature:g}, W={self.window}")


def _counts(by_rank: list[lp.GenerationOutput]) -> Result:
    """The result of one text: its tokens, its steps, and the sum over steps of the largest rank's step tokens."""
    steps = zip(*(output.step_stats for output in by_rank), strict=True)
    largest = [max(step.num_tokens for step in ranks) for ranks in steps]
    first = by_rank[0]
    found: dict[str, Any] = {"tokens": len(first.tokens), "steps": first.steps, "ids": first.tokens}
    return found | {"largest_tokens": sum(largest), "most_tokens": max(largest)}


def _cells(name: str, of: list[Result]) -> tuple[str, ...]:
    by_method = grouped(sorted(of, key=lambda each: (each["set"], each["index"])), "method")
    ranks, one = by_method[RANKS], by_method[ONE]
    ratio = compression(ranks) / compression(one)
    speeds = (f"{value:.3f}" for value in (compression(ranks), compression(one), ratio))
    largest = total(ranks, "largest_tokens") / total(ranks, "steps")
    differing = sum(several["ids"] != alone["ids"] for several, alone in zip(ranks, one, strict=True))
    return name, str(len(ranks)), *speeds, f"{largest:.1f}", str(differing)
