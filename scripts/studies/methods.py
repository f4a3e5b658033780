"""Tokens a second of the adaptive decoder beside its peers, in alternation, resumable.

    python scripts/tables.py methods results.jsonl --tasks data/humaneval.jsonl data/gsm8k.jsonl --limit 10

Each line of the file is one prompt at one temperature by one method: seconds, tokens and steps. A run stops after
`--seconds` and goes on from the file when started again with the same settings; `--seconds 0` only prints. Rates are
tokens over seconds of all prompts; behind them the median over prompts of the adaptive decoder's rate to that method's,
and the least and most. Prefill included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import lp
from launch.config.builders import ORACLE, PLAIN
from lp.digest import chain_digest
from lp.optional import is_installed

from .harness import Method, Result, Row, Table, TextStudy, grouped, option, ratios, spread, task_rows, total, values

DEFAULT = "adaptive"
WARM_IDS = [*range(50, 90)]
Build = Callable[[Any], lp.Decoder]


@dataclass(kw_only=True)
class Methods(TextStudy):
    """Times the adaptive decoder and its peers on the same prompts, in turn."""

    results: Path = option(help="JSONL to write, or to go on with")
    tasks: list[Path] = option([], "JSONL of prompts")
    limit: int = option(10, "first prompts of every task")
    temperatures: list[float] = option([0.0, 0.8])
    fixed: list[str] = option([], "fixed settings beside the default, as W,N,G,depth")
    only: list[str] = option([], "methods beside the default, as the tables name them")
    SHARED = (*TextStudy.SHARED, "fixed", "only")

    def rows(self) -> Iterable[Row]:
        """Tasks and temperatures in turn."""
        rows = task_rows(self.tasks, self.limit, self.temperatures, "--tasks")
        return sorted(rows, key=lambda row: row.key["index"])

    def methods(self) -> Mapping[str, Method]:
        """The methods to time: all that run here, or the adaptive decoder and those of `--only`; and `--fixed` ones."""
        lookahead = partial(partial, lp.LookaheadDecoder)
        builds: dict[str, Build] = {
            DEFAULT: lp.LookaheadDecoder,
            PLAIN: lp.PlainDecoder,
            ORACLE: lp.AutoregressiveDecoder,
            "prompt lookup": lookahead(config=lp.PromptLookupConfig()),
            "token recycling": lookahead(config=lp.RecyclingConfig()),
        }
        if is_installed("arctic_inference"):
            builds["suffix"] = lookahead(config=lp.SuffixConfig())
        found = {name: self.decodes(self.warm(build)) for name, build in builds.items()}
        found["generate"] = self.by_transformers()
        found |= {f"generate, lookup {n}": self.by_transformers(prompt_lookup_num_tokens=n) for n in (3, 10)}
        found = {name: method for name, method in found.items() if name == DEFAULT or name in (self.only or found)}
        for setting in self.fixed:
            w, n, g, depth = map(int, setting.split(","))
            config = lp.LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=g, draft_depth=depth)
            found[f"W={w} N={n} G={g} depth={depth}"] = self.decodes(self.warm(lookahead(config=config)))
        return found

    def warm(self, build: Build) -> Build:
        """Build a decoder and decode a few tokens with it, so that what it does once is not measured."""

        def warmed(model: Any) -> lp.Decoder:
            decoder = build(model)
            decoder.generate(WARM_IDS, 8)
            return decoder

        return warmed

    def by_transformers(self, **options: Any) -> Method:
        """transformers' own `generate`: greedy or sampled, or with its prompt lookup."""

        @cache
        def model() -> Any:
            model = self.loaded.model
            model.generation_config.pad_token_id = model.generation_config.pad_token_id or 0
            generate(model, WARM_IDS, 0.0)
            return model

        def generate(model: Any, ids: list[int], temperature: float) -> list[int]:
            sampling: dict[str, Any] = {"do_sample": False}
            if temperature:
                sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
            prompt = torch.tensor([ids])
            given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": self.max_new_tokens}
            output = model.generate(prompt, **given, **sampling, **options)
            return output[0, len(ids) :].tolist()

        def method(row: Row) -> Result:
            torch.manual_seed(row.key["index"])
            ids, own = self.ids(row.item), model()
            start = time.perf_counter()
            tokens = generate(own, ids, row.key["temperature"])
            took = {"seconds": time.perf_counter() - start}
            return took | {"tokens": len(tokens), "steps": 0, "text": chain_digest(0, tokens)}

        return method

    def tables(self, results: list[Result]) -> Iterable[Table]:
        """A table for each temperature: tokens a second of every method, task by task."""
        for temperature, of in sorted(grouped(results, "temperature").items()):
            cells = grouped(of, "task", "method")
            tasks = sorted(grouped(of, "task"))
            counts = ", ".join(f"{task} {len(cells[task, DEFAULT])}" for task in tasks)
            lines = [
                (name, *(_cell(cells[task, DEFAULT], cells.get((task, name), [])) for task in tasks))
                for name in grouped(of, "method")
            ]
            yield Table(("method", *tasks), lines, f"T = {temperature:g}, prompts: {counts}")
        oracle = {_prompt(each): each["text"] for each in results if each["method"] == ORACLE}
        ours = [each for each in results if _prompt(each) in oracle and not each["method"].startswith("generate")]
        if ours:
            other = sum(each["text"] != oracle[_prompt(each)] for each in ours)
            yield Table(("texts of lp's decoders", "that are not plain decoding's"), [(str(len(ours)), str(other))])


def _prompt(result: Result) -> tuple[str, int, float]:
    return result["task"], result["index"], result["temperature"]


def _cell(ours: list[Result], of: list[Result]) -> str:
    """A cell of the table: a method's tokens a second, and how many times as fast the adaptive decoder is."""
    if not of:
        return "-"
    adaptive = {_prompt(each): each for each in ours}
    above = [adaptive[_prompt(each)] for each in of]
    rates = [ratios(values(each, "tokens"), values(each)) for each in (above, of)]
    return f"{total(of, 'tokens') / total(of, 'seconds'):.0f}, {spread(ratios(*rates), 2)}"
