"""Texts that take steps together, against transformers' batch, plain batches and one text by one.

python scripts/tables.py batches --texts 4,8 --temperatures 0,0.8 --task data/humaneval.jsonl

Prompts are cut to their last tokens, so that all have as many, and no text ends early. Speeds are medians over rounds,
and behind them how many times as fast lookahead's batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch

import lp
from lp.errors import UserError

from .harness import (
    Method,
    PromptStudy,
    Result,
    Row,
    Table,
    compression,
    grouped,
    option,
    ratios,
    sampling_at,
    spread,
    values,
)

OURS, PLAIN, SERIAL, TRANSFORMERS = "lookahead", "plain", "lookahead, one by one", "transformers"
NAMES = (OURS, PLAIN, SERIAL, TRANSFORMERS)


@dataclass(kw_only=True)
class Batches(PromptStudy):
    """Four ways to decode several prompts, by their number."""

    texts: list[int] = option([4, 8], "in a step")
    temperatures: list[float] = option([0.0, 0.8])
    prompt_tokens: int = option(96, "of every prompt, its last ones")
    rounds: int = option(5)
    max_new_tokens: int = option(128)
    SHARED = (*PromptStudy.SHARED, "prompt_tokens", "task_name")
    WARM_UP = 1

    def rows(self) -> Iterable[Row]:
        return [Row({"texts": texts, "temperature": at}) for at in self.temperatures for texts in self.texts]

    @cached_property
    def prompt_ids(self) -> list[list[int]]:
        """The prompts, all of one length."""
        whole = [ids for prompt in self.prompts if len(ids := self.ids(prompt.text)) >= self.prompt_tokens]
        if len(whole) < max(self.texts):
            raise UserError(
                f"{len(whole)} prompts have {self.prompt_tokens} tokens, but --texts is {max(self.texts)}; give a "
                "larger --task, or fewer --prompt-tokens"
            )
        return [ids[-self.prompt_tokens :] for ids in whole]

    def methods(self) -> Mapping[str, Method]:
        lookahead, plain = lp.LookaheadDecoder(self.loaded.model), lp.PlainDecoder(self.loaded.model)
        new, prompts = self.max_new_tokens, self.prompt_ids

        def batch(decoder: lp.LookaheadDecoder | lp.PlainDecoder) -> Callable[[Row], Result]:
            def method(row: Row) -> Result:
                texts = row.key["texts"]
                given: dict[str, Any] = {
                    "sampling": sampling_at(row.key["temperature"]),
                    "eos_token_id": (),
                    "max_sequences": texts,
                }
                return _counts(decoder.generate_batch(prompts[:texts], new, **given))

            return method

        def one_by_one(row: Row) -> Result:
            given: dict[str, Any] = {"sampling": sampling_at(row.key["temperature"]), "eos_token_id": ()}
            texts = enumerate(prompts[: row.key["texts"]])
            return _counts([lookahead.generate(ids, new, sequence=index, **given) for index, ids in texts])

        def transformers(row: Row) -> Result:
            ids = torch.tensor(prompts[: row.key["texts"]], device=self.loaded.model.device)
            ends = {"min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
            temperature = row.key["temperature"]
            sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
            self.loaded.model.generate(
                ids, attention_mask=torch.ones_like(ids), **{"do_sample": False} | ends | sampled
            )
            return {"tokens": new * len(ids)}

        return dict(zip(NAMES, (batch(lookahead), batch(plain), one_by_one, transformers), strict=True))

    def tables(self, results: list[Result]) -> Iterable[Table]:
        lines = []
        for (texts, temperature), of in grouped(results, "texts", "temperature").items():
            by_name = grouped(of, "method")
            speeds = {name: ratios(values(by_name[name], "tokens"), values(by_name[name])) for name in NAMES}
            times = {name: median(ratios(speeds[OURS], speeds[name])) for name in NAMES}
            cells = [spread(speeds[name]) + f", {times[name]:.2f} x" * (name != OURS) for name in NAMES]
            lines.append((str(texts), f"{temperature:g}", f"{compression(by_name[OURS]):.2f}", *cells))
        yield Table(("texts", "T", "S", *(f"{name}, tokens/s" for name in NAMES)), lines)


def _counts(outputs: list[lp.GenerationOutput]) -> Result:
    return {
        "tokens": sum(len(output.tokens) for output in outputs),
        "steps": sum(output.steps for output in outputs),
    }
