"""S of R ranks with B tokens each against S of one rank with R x B: docs/experiments/scaling.md.

    python scripts/tables.py shares_compression --data data --sets humaneval,gsm8k --ranks 8 --budget 64

The sets are JSONL files of prompts in the folder --data, the built-in prompts without it. Ranks are threads of this
process, so their speed says nothing. Prints a Markdown table a temperature and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import lp
from launch.bench.summary import markdown
from launch.data.prompts import load_builtin, load_jsonl
from lp.errors import UserError
from lp.models.loader import Loaded, context_limit
from lp.parallel.thread_ranks import run_lockstep

from ._common import add_model_arguments, by_commas, load_model, progress, sampling_at

BUILTIN = "built-in"
ALL_SETS = "all sets"


@dataclass
class Total:
    """Sums over the prompts of one set at one temperature.

    Attributes:
        tokens, steps, one_steps: generated tokens; steps of R ranks, and of one rank with as many tokens.
        largest_tokens: step tokens of the largest rank, of all steps.
        most_tokens: of the largest rank in any step.
        differing: prompts whose texts are not the same, which rounding can do.
    """

    name: str
    temperature: float
    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    one_tokens: int = 0
    one_steps: int = 0
    largest_tokens: int = 0
    most_tokens: int = 0
    differing: int = 0

    def add(self, by_rank: Sequence[lp.GenerationOutput], one: lp.GenerationOutput) -> None:
        """A prompt's text, of all ranks and of one."""
        largest = [
            max(step.num_tokens for step in steps) for steps in zip(*(o.step_stats for o in by_rank), strict=True)
        ]
        self.prompts += 1
        self.tokens += len(by_rank[0].tokens)
        self.steps += by_rank[0].steps
        self.one_tokens += len(one.tokens)
        self.one_steps += one.steps
        self.largest_tokens += sum(largest)
        self.most_tokens = max(self.most_tokens, *largest)
        self.differing += by_rank[0].tokens != one.tokens

    @property
    def compression(self) -> float:
        """S of R ranks."""
        return self.tokens / self.steps

    @property
    def one_compression(self) -> float:
        """S of one rank."""
        return self.one_tokens / self.one_steps

    @property
    def ratio(self) -> float:
        """Of both."""
        return self.compression / self.one_compression

    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        speeds = (f"{value:.3f}" for value in (self.compression, self.one_compression, self.ratio))
        return self.name, str(self.prompts), *speeds, f"{self.largest_tokens / self.steps:.1f}"

    def figures(self) -> dict[str, object]:
        """For the line of JSON."""
        return {**asdict(self), "S": self.compression, "S_one": self.one_compression, "ratio": self.ratio}


def fixed_config(window: int, ranks: int, budget: int) -> lp.LookaheadConfig:
    """N = 2, and on every rank exactly `budget` step tokens.

    Raises:
        ValueError: the window leaves no rank a draft token.
    """
    guesses = ranks * budget - max(window, 1) - (ranks - 1)
    if window > budget or guesses < 0:
        raise UserError(f"--budget {budget} has no room for --window {window}; give a larger budget")
    return lp.LookaheadConfig(window_size=window, ngram_size=2, guess_set_size=guesses)


def decode_all(
    loaded: Loaded,
    config: lp.LookaheadConfig,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    temperature: float,
    context: lp.ParallelContext,
) -> list[lp.GenerationOutput]:
    """What one rank of some decodes; the index of a prompt is its sequence, so that noise differs."""
    decoder = lp.LookaheadDecoder(loaded.model, config, context, capture="off")  # threads cannot capture
    shown = progress(prompts, f"{context.world_size} ranks, T = {temperature:g}") if context.is_main else prompts
    sampling = sampling_at(temperature)
    return [decoder.generate(ids, max_new_tokens, sampling, sequence=index) for index, ids in enumerate(shown)]


def read_sets(args: argparse.Namespace, loaded: Loaded) -> dict[str, list[list[int]]]:
    """Token ids of the prompts by set; those that fill the context are left out."""
    texts = {BUILTIN: load_builtin(args.limit)}
    if args.data:
        texts = {name: load_jsonl(args.data / f"{name}.jsonl", args.limit) for name in args.sets}
    most = context_limit(loaded.model)
    sets: dict[str, list[list[int]]] = {}
    for name, prompts in texts.items():
        ids = [list(loaded.tokenizer(prompt.text)["input_ids"]) for prompt in prompts]
        sets[name] = [prompt for prompt in ids if most is None or len(prompt) < most]
        if len(sets[name]) < len(ids):
            print(f"{name}: {len(ids) - len(sets[name])} prompts fill the context and are left out", file=sys.stderr)
    return {name: prompts for name, prompts in sets.items() if prompts}


def measure(
    loaded: Loaded, sets: dict[str, list[list[int]]], temperature: float, args: argparse.Namespace
) -> list[Total]:
    """Every set, and all of them together."""
    whole = Total(ALL_SETS, temperature)
    totals = []
    for name, prompts in sets.items():
        shared = fixed_config(args.window, args.ranks, args.budget)
        alone = fixed_config(args.window, 1, args.ranks * args.budget)
        by_rank = run_lockstep(
            args.ranks, partial(decode_all, loaded, shared, prompts, args.max_new_tokens, temperature)
        )
        one = decode_all(loaded, alone, prompts, args.max_new_tokens, temperature, lp.ParallelContext())
        total = Total(name, temperature)
        for outputs in zip(*by_rank, one, strict=True):
            for each in (total, whole):
                each.add(outputs[:-1], outputs[-1])
        totals.append(total)
    return [*totals, whole] if len(totals) > 1 else totals


def add_set_arguments(parser: argparse.ArgumentParser, limit: int, temperatures: list[float]) -> None:
    """Options that `read_sets` reads, and what is decoded of them."""
    sets = ["humaneval", "classeval", "gsm8k", "mtbench"]
    parser.add_argument("--data", type=Path, help="folder of SET.jsonl; the built-in prompts without it")
    parser.add_argument("--sets", type=by_commas(str), default=sets, help="by commas")
    parser.add_argument("--limit", type=int, default=limit, help="first prompts of every set")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=by_commas(float), default=temperatures, help="by commas; 0 is greedy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_set_arguments(parser, limit=16, temperatures=[0.0, 0.3, 0.8])
    parser.add_argument("--ranks", type=int, default=8, help="R")
    parser.add_argument("--budget", type=int, default=64, help="B, step tokens of every rank")
    parser.add_argument("--window", type=int, default=0, help="W, with N = 2")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    fixed_config(args.window, args.ranks, args.budget)  # refused before the model is loaded
    loaded = load_model(args)
    sets = read_sets(args, loaded)
    many = f"S of {args.ranks} ranks x {args.budget} tokens"
    one = f"S of one rank x {args.ranks * args.budget}"
    results = []
    for temperature in args.temperatures:
        totals = measure(loaded, sets, temperature, args)
        print(f"T = {temperature:g}, W={args.window}\n")
        heads = ("set", "prompts", many, one, "ratio", "tokens of the largest rank a step")
        print(markdown(heads, [total.cells() for total in totals]), flush=True)
        results += [total.figures() for total in totals]
    settings = {key: value for key, value in vars(args).items() if key != "data"} | {"sets": list(sets)}
    print(json.dumps({"settings": settings, "results": results}))
