"""Tokens a step (S) under a grammar, on drawn tasks that ask for JSON: docs/experiments/serving.md.

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

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from itertools import takewhile

import torch

import lp
from launch.bench.summary import markdown
from lp.errors import UserError
from lp.models.loader import vocabulary_size
from lp.sampling.grammar import Grammar, GrammarProcessor

from ._common import add_model_arguments, budget_config, by_commas, load_model, progress, sampling_at
from .parts.json_tasks import drawn_task

PLAIN = "plain"
WITH, MASKS, WITHOUT, JSON_WITH, JSON_WITHOUT = "with", "masks alone", "without", "JSON, with", "JSON, without"
COLUMNS = (WITH, MASKS, WITHOUT, JSON_WITH, JSON_WITHOUT)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", type=int, default=40, help="drawn tasks")
    parser.add_argument("--shown", type=int, default=1, help="objects in a prompt")
    parser.add_argument("--temperatures", type=by_commas(float), default=[0.0, 0.8], help="by commas")
    parser.add_argument("--budget", type=int, default=0, help="step tokens; 0: what pays on this machine")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    if args.tasks < 1 or args.shown < 0:
        raise UserError(f"--tasks is {args.tasks}, --shown {args.shown}; the first must be at least 1, the other 0")
    loaded = load_model(args)
    lookahead = lp.LookaheadDecoder(loaded.model, budget_config(args.budget) if args.budget else None)
    plain = lp.PlainDecoder(loaded.model)
    compiler = lp.GrammarCompiler(loaded.tokenizer, vocabulary_size(loaded.model))
    lines, figures = [], []
    for temperature in args.temperatures:
        counts = {name: [0, 0.0] for name in COLUMNS}
        ended, seconds = 0, {PLAIN: 0.0, WITH: 0.0}
        for case in progress(range(args.tasks), "tasks"):
            task = drawn_task(random.Random(f"task-{case}"), args.shown)
            grammar = compiler.json_schema(task.schema)
            ids = list(loaded.tokenizer(task.prompt)["input_ids"])
            outputs = _outputs(lookahead, plain, ids, grammar, temperature, case, args.max_new_tokens)
            check_tokens(outputs, task.prompt)
            ended += outputs[WITH].finish_reason == "eos"
            for name in seconds:
                seconds[name] += outputs[name].decode_s
            for name, tokens, steps in _measured(outputs):
                counts[name][0] += tokens
                counts[name][1] += steps
        compression = {name: tokens / steps if steps else 0.0 for name, (tokens, steps) in counts.items()}
        cells = [f"{compression[name]:.2f}" for name in COLUMNS]
        time = seconds[WITH] / seconds[PLAIN]
        ends = f"{ended}/{args.tasks}"
        lines.append([f"{temperature:g}", ends, *cells, str(counts[JSON_WITH][0]), f"{time:.2f} x"])
        found = {"ended": ended, "S": compression, "counts": counts, "decode_s": seconds}
        figures.append({"temperature": temperature, **found})
    budget = f"{args.budget} step tokens" if args.budget else "steps of what pays"
    print(f"{args.model}, {args.dtype}, {args.threads} thread(s), {args.tasks} tasks, {args.shown} shown, {budget}: S")
    print(markdown(("T", "ended", *COLUMNS, "JSON tokens", "time"), lines))
    settings = {"model": args.model, "torch": torch.__version__, "shown": args.shown, "budget": args.budget}
    print(json.dumps({**settings, "figures": figures}))


def _outputs(
    lookahead: lp.LookaheadDecoder,
    plain: lp.PlainDecoder,
    ids: list[int],
    grammar: Grammar,
    temperature: float,
    case: int,
    most: int,
) -> dict[str, lp.GenerationOutput]:
    """Of the four ways to decode."""
    eos = lookahead.model.generation_config.eos_token_id
    ends = [eos] if isinstance(eos, int) else list(eos or ())
    sampling = sampling_at(temperature)
    masks = [GrammarProcessor(grammar, ends, len(ids))]
    return {
        PLAIN: plain.generate(ids, most, sampling, sequence=case, grammar=grammar),
        WITH: lookahead.generate(ids, most, sampling, sequence=case, grammar=grammar),
        MASKS: lookahead.generate(ids, most, sampling, sequence=case, logits_processor=masks),
        WITHOUT: lookahead.generate(ids, most, sampling, sequence=case),
    }


def check_tokens(outputs: Mapping[str, lp.GenerationOutput], prompt: str) -> None:
    """Refuse figures of texts that are not those of plain decoding under the same grammar.

    Raises:
        RuntimeError: the first token that differs.
    """
    expected = outputs[PLAIN].tokens
    for name in (WITH, MASKS):
        found = outputs[name].tokens
        if found != expected:
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, found, strict=False)))
            raise RuntimeError(f"{name!r} differs from plain decoding at new token {common} behind {prompt!r}")


def _measured(outputs: dict[str, lp.GenerationOutput]) -> Iterator[tuple[str, int, float]]:
    """(column, tokens, steps)."""
    for name in (WITH, MASKS, WITHOUT):
        yield name, len(outputs[name].tokens), outputs[name].steps
    pairs = zip(outputs[WITH].tokens, outputs[WITHOUT].tokens, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    yield JSON_WITH, common, steps_to(outputs[WITH], common)
    yield JSON_WITHOUT, common, steps_to(outputs[WITHOUT], common)


def steps_to(output: lp.GenerationOutput, tokens: int) -> float:
    """Steps to so many tokens; of the last one, the part that they are of its tokens."""
    steps = 0.0
    for step in output.step_stats:
        added = step.accepted + 1
        if added >= tokens:
            return steps + tokens / added
        tokens -= added
        steps += 1
    return steps
