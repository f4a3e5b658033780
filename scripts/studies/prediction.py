"""S and time a token with a predicted text: the right one, an edited one, and none: docs/experiments/serving.md.

    python scripts/tables.py prediction --limit 8 --rounds 3

The right text is what the decoder generates without one. In the edited text, runs of tokens are left out, replaced by
others or inserted, until they sum up to the asked-for part of it. All three generate the same tokens, which is checked.
They take turns; the time of a text is the median over rounds, of its decode steps alone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import lp
from launch.bench.summary import markdown
from lp.errors import UserError

from ._common import (
    add_model_arguments,
    add_prompt_arguments,
    by_commas,
    load_model,
    load_prompts,
    median_and_range,
    progress,
    sampling_at,
)

WITHOUT, RIGHT, EDITED = "none", "right", "edited"
LOW_COMPRESSION = 6.0  # S without a prediction, below which a text has much to gain
HEADS = (
    "T",
    "prediction",
    "S",
    "x none",
    f"least x none, S < {LOW_COMPRESSION:g}",
    "time a token (by text)",
    "accepted",
)


@dataclass(frozen=True)
class Measured:
    """One text with one prediction.

    Args:
        compression: S.
        decode_s: seconds of its decode steps, the median over rounds.
        accepted: part of the text's tokens that were accepted from the prediction.
    """

    compression: float
    decode_s: float
    accepted: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperatures", type=by_commas(float), default=[0.0, 0.8], help="by commas")
    parser.add_argument("--edited", type=float, default=0.1, help="part of the text's tokens that is edited")
    parser.add_argument("--edit-tokens", type=int, default=8, help="tokens of one edit")
    parser.add_argument("--rounds", type=int, default=3)
    add_prompt_arguments(parser, max_new_tokens=200)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    if not 0 < args.edited <= 1 or args.edit_tokens < 1 or args.rounds < 1:
        raise UserError(
            f"--edited is {args.edited:g}, --edit-tokens {args.edit_tokens}, --rounds {args.rounds}; the first must be "
            "above 0 and at most 1, the others at least 1"
        )
    loaded = load_model(args)
    decoder = lp.LookaheadDecoder(loaded.model)
    prompts = [list(loaded.tokenizer(prompt.text)["input_ids"]) for prompt in load_prompts(args)]
    lines, figures = [], []
    for temperature in args.temperatures:
        texts = [
            _measure(decoder, ids, index, temperature, args)
            for index, ids in enumerate(progress(prompts, f"T = {temperature:g}"))
        ]
        for name in (WITHOUT, RIGHT, EDITED):
            found = summary([text[name] for text in texts], [text[WITHOUT] for text in texts])
            least = "-" if found["least_ratio"] is None else f"{found['least_ratio']:.2f}"
            cells = [f"{found['compression']:.2f}", f"{found['ratio']:.2f}", least]
            cells.append(median_and_range(found["time_ratios"], 2, " x"))
            lines.append([f"{temperature:g}", name, *cells, f"{found['accepted']:.0%}"])
            figures.append({"temperature": temperature, "prediction": name, **found})
    print(
        f"{args.model}, {args.dtype}, {args.threads} thread(s), {len(prompts)} texts of {args.max_new_tokens} tokens, "
        f"{args.edited:.0%} edited in runs of {args.edit_tokens}, medians of {args.rounds}"
    )
    print(markdown(HEADS, lines))
    print(json.dumps({"model": args.model, "torch": torch.__version__, "figures": figures}))


def edited(tokens: Sequence[int], part: float, run: int, draws: random.Random) -> list[int]:
    """A text with edits at even distances, by turns left out, replaced and inserted.

    Args:
        tokens: of the text.
        part: of them, how many are edited.
        run: tokens of one edit.
        draws: where the edits begin, and the tokens that they bring, which are other tokens of the text.
    """
    edits = max(round(part * len(tokens) / run), 1)
    stretch = len(tokens) // edits  # that has one edit
    result: list[int] = []
    for edit in range(edits):
        own = list(tokens[edit * stretch : (edit + 1) * stretch if edit < edits - 1 else len(tokens)])
        at = draws.randrange(max(stretch - run, 1))
        dropped = run if edit % 3 < 2 else 0
        brought = draws.choices(tokens, k=run) if edit % 3 else []
        result += own[:at] + brought + own[at + dropped :]
    return result


def summary(texts: Sequence[Measured], without: Sequence[Measured]) -> dict[str, Any]:
    """Of texts of one length, beside the same ones without a prediction.

    Returns:
        S of all; its ratio; the least ratio of a text whose S was low, None if there is none; the ratio of each text's
        time; the mean accepted part.
    """
    ratios = [text.compression / none.compression for text, none in zip(texts, without, strict=True)]
    low = [ratio for ratio, none in zip(ratios, without, strict=True) if none.compression < LOW_COMPRESSION]
    return {
        "compression": _together(texts),
        "ratio": _together(texts) / _together(without),
        "least_ratio": min(low, default=None),
        "time_ratios": [text.decode_s / none.decode_s for text, none in zip(texts, without, strict=True)],
        "accepted": sum(text.accepted for text in texts) / len(texts),
    }


def _together(texts: Sequence[Measured]) -> float:
    """S of texts of one length: their tokens by their steps."""
    return len(texts) / sum(1 / text.compression for text in texts)


def _measure(
    decoder: lp.LookaheadDecoder, ids: list[int], index: int, temperature: float, args: argparse.Namespace
) -> dict[str, Measured]:
    def generate(prediction: Sequence[int]) -> lp.GenerationOutput:
        sampling = sampling_at(temperature)
        return decoder.generate(
            ids, args.max_new_tokens, sampling, eos_token_id=(), sequence=index, prediction=prediction
        )

    tokens = generate(()).tokens
    changed = edited(tokens, args.edited, args.edit_tokens, random.Random(index))
    outputs: dict[str, list[lp.GenerationOutput]] = {WITHOUT: [], RIGHT: [], EDITED: []}
    for _ in range(args.rounds):
        for name, prediction in ((WITHOUT, ()), (RIGHT, tokens), (EDITED, changed)):
            output = generate(prediction)
            if output.tokens != tokens:
                raise RuntimeError(f"text {index}, prediction {name}: other tokens than without one")
            outputs[name].append(output)
    return {
        name: Measured(
            compression=median(output.compression for output in of_name),
            decode_s=median(output.decode_s for output in of_name),
            accepted=of_name[0].accepted_prediction / len(tokens),
        )
        for name, of_name in outputs.items()
    }
