"""Tokens a step (S) under a grammar, on drawn tasks that ask for JSON.

python scripts/tables.py grammar --tasks 40 --shown 1 --budget 64

A prompt shows objects of a drawn schema, one a line; asked for is one more. Compared are

- `with`: decoding under the schema's grammar;
- `masks alone`: the same, whose draft tokens know nothing of the grammar;
- `without`: free decoding, all of its tokens, most of which are not the JSON that was asked for;
- `JSON, with` and `JSON, without`: the tokens that both have, which are all of the free text up to where it stops
  following the schema.

The tokens of the first two are compared with those of plain decoding under the grammar; `time` is that of a token of
`with`, beside one of that.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import lp
from lp.errors import UserError
from lp.models.loader import vocabulary_size
from lp.sampling.grammar import Grammar, GrammarProcessor

from .harness import Method, Result, Row, Table, TextStudy, budget_config, grouped, option, sampling_at, total
from .parts.json_tasks import JsonTask, drawn_task

PLAIN = "plain"
WITH, MASKS, WITHOUT, JSON_WITH, JSON_WITHOUT = "with", "masks alone", "without", "JSON, with", "JSON, without"
COLUMNS = (WITH, MASKS, WITHOUT, JSON_WITH, JSON_WITHOUT)


@dataclass(kw_only=True)
class GrammarStudy(TextStudy):
    """Measures S on drawn tasks with a grammar, with its masks alone, and without."""

    tasks: int = option(40, "drawn tasks")
    shown: int = option(1, "objects in a prompt")
    temperatures: list[float] = option([0.0, 0.8])
    budget: int = option(0, "step tokens; 0: what pays on this machine")
    SHARED = (*TextStudy.SHARED, "shown", "budget")

    def rows(self) -> Iterable[Row]:
        if self.tasks < 1 or self.shown < 0:
            given = f"--tasks is {self.tasks}, --shown {self.shown}"
            raise UserError(f"{given}; the first must be at least 1, the other 0")
        tasks = [drawn_task(random.Random(f"task-{case}"), self.shown) for case in range(self.tasks)]
        for temperature in self.temperatures:
            for index, task in enumerate(tasks):
                yield Row({"temperature": temperature, "index": index}, task)

    @cached_property
    def compiler(self) -> lp.GrammarCompiler:
        """Compiles schemas to grammars over this model's tokens; made once."""
        return lp.GrammarCompiler(self.loaded.tokenizer, vocabulary_size(self.loaded.model))

    def methods(self) -> Mapping[str, Method]:
        lookahead = lp.LookaheadDecoder(self.loaded.model, budget_config(self.budget) if self.budget else None)
        plain = lp.PlainDecoder(self.loaded.model)
        eos = self.loaded.model.generation_config.eos_token_id
        ends = [eos] if isinstance(eos, int) else list(eos or ())

        def way(decoder: lp.Decoder, limits: Any) -> Method:
            def method(row: Row) -> Result:
                task: JsonTask = row.item
                ids = self.ids(task.prompt)
                given = limits(self.compiler.json_schema(task.schema), ids)
                sampling = sampling_at(row.key["temperature"])
                output = decoder.generate(ids, self.max_new_tokens, sampling, sequence=row.key["index"], **given)
                return {
                    "ids": output.tokens,
                    "tokens": len(output.tokens),
                    "steps": output.steps,
                    "accepted": [step.accepted for step in output.step_stats],
                    "ended": output.finish_reason == "eos",
                    "decode_s": output.decode_s,
                }

            return method

        def under(grammar: Grammar, ids: list[int]) -> dict[str, Any]:
            return {"grammar": grammar}

        def masked(grammar: Grammar, ids: list[int]) -> dict[str, Any]:
            return {"logits_processor": [GrammarProcessor(grammar, ends, len(ids))]}

        def free(grammar: Grammar, ids: list[int]) -> dict[str, Any]:
            return {}

        ways = {PLAIN: (plain, under), WITH: (lookahead, under), MASKS: (lookahead, masked), WITHOUT: (lookahead, free)}
        return {name: way(decoder, limits) for name, (decoder, limits) in ways.items()}

    def check(self, row: Row, results: list[Result]) -> None:
        """Refuse texts that are not those of plain decoding under the same grammar."""
        by_name = {result["method"]: result for result in results}
        for name in (WITH, MASKS):
            if name in by_name and by_name[name]["ids"] != by_name[PLAIN]["ids"]:
                at = common(by_name[PLAIN]["ids"], by_name[name]["ids"])
                raise RuntimeError(f"{name!r} differs from plain decoding at new token {at} behind {row.item.prompt!r}")

    def tables(self, results: list[Result]) -> Iterable[Table]:
        lines = []
        for temperature, of in grouped(results, "temperature").items():
            by_name = grouped(of, "method")
            counts = {name: (total(by_name[name], "tokens"), total(by_name[name], "steps")) for name in COLUMNS[:3]}
            pairs = [*zip(by_name[WITH], by_name[WITHOUT], strict=True)]
            shared = [common(with_["ids"], without["ids"]) for with_, without in pairs]
            for at, name in enumerate((JSON_WITH, JSON_WITHOUT)):
                steps = sum(steps_to(pair[at]["accepted"], count) for pair, count in zip(pairs, shared, strict=True))
                counts[name] = (sum(shared), steps)
            cells = [f"{tokens / steps if steps else 0:.2f}" for tokens, steps in counts.values()]
            time = total(by_name[WITH], "decode_s") / total(by_name[PLAIN], "decode_s")
            ended = f"{total(by_name[WITH], 'ended')}/{len(pairs)}"
            lines.append((f"{temperature:g}", ended, *cells, str(sum(shared)), f"{time:.2f} x"))
        yield Table(("T", "ended", *COLUMNS, "JSON tokens", "time"), lines, "S")


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both texts begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def steps_to(accepted: Sequence[int], tokens: int) -> float:
    """Steps that a decoder took to a text's first `tokens` tokens; the last step counts in part, so that S is fair.

    Args:
        accepted: draft tokens that each step accepted; it adds one more.
        tokens: how many tokens of the text, from its beginning, are to be reached.
    """
    steps = 0.0
    for each in accepted:
        added = each + 1
        if added >= tokens:
            return steps + tokens / added
        tokens -= added
        steps += 1
    return steps
