"""S and time a token with a predicted text: the right one, an edited one, and none.

    python scripts/tables.py prediction --limit 8 --rounds 3

The right text is what the decoder generates without one. In the edited text, runs of tokens are left out, replaced by
others or inserted, until they sum up to the asked-for part of it. All three generate the same tokens, which is checked.
They take turns; the time of a text is the median over rounds, of its decode steps alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import median
from typing import Any

import lp
from lp.errors import UserError

from .harness import Method, PromptStudy, Result, Row, Table, counts, grouped, option, sampling_at, spread, values

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
    """What one text took to decode with one prediction.

    Args:
        compression: S, generated tokens a step.
        decode_s: seconds of its decode steps, the median over rounds.
        accepted: part of the text's tokens that were accepted from the prediction.
    """

    compression: float
    decode_s: float
    accepted: float


def edited(tokens: Sequence[int], part: float, run: int, draws: random.Random) -> list[int]:
    """A text with edits at even distances, by turns left out, replaced and inserted.

    Args:
        tokens: token ids of the text.
        part: part of the tokens that are edited, 0 to 1.
        run: number of tokens that one edit removes, replaces or adds.
        draws: draws where the edits begin, and the tokens that they bring, which are other tokens of the text.
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
    """Compare texts that were decoded with a prediction with the same texts without one; all have one length.

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


@dataclass(kw_only=True)
class Predictions(PromptStudy):
    """Decodes each text with the right prediction, with an edited one, and with none."""

    temperatures: list[float] = option([0.0, 0.8])
    edited: float = option(0.1, "part of the text's tokens that is edited")
    edit_tokens: int = option(8, "tokens of one edit")
    rounds: int = option(3)
    max_new_tokens: int = option(200)
    SHARED = (*PromptStudy.SHARED, "edited", "edit_tokens")

    def rows(self) -> Iterable[Row]:
        if not 0 < self.edited <= 1 or self.edit_tokens < 1 or self.rounds < 1:
            given = f"--edited is {self.edited:g}, --edit-tokens {self.edit_tokens}, --rounds {self.rounds}"
            raise UserError(f"{given}; the first must be above 0 and at most 1, the others at least 1")
        for temperature in self.temperatures:
            yield from self.prompt_rows(temperature=temperature)

    def methods(self) -> Mapping[str, Method]:
        decoder = cache(lambda: lp.LookaheadDecoder(self.loaded.model))

        def generate(row: Row, prediction: Sequence[int]) -> lp.GenerationOutput:
            given = {"eos_token_id": (), "sequence": row.key["index"], "prediction": prediction}
            sampling = sampling_at(row.key["temperature"])
            return decoder().generate(self.ids(row.item), self.max_new_tokens, sampling, **given)

        @lru_cache(maxsize=1)
        def tokens(**key: Any) -> list[int]:
            return generate(Row(key, self.prompts[key["index"]].text), ()).tokens

        def changed(row: Row) -> list[int]:
            return edited(tokens(**row.key), self.edited, self.edit_tokens, random.Random(row.key["index"]))

        predictions = {WITHOUT: lambda row: (), RIGHT: lambda row: tokens(**row.key), EDITED: changed}

        def method(name: str) -> Method:
            def predicted(row: Row) -> Result:
                output = generate(row, predictions[name](row))
                accepted = output.accepted_prediction / len(output.tokens)
                return counts(output) | {"decode_s": output.decode_s, "accepted": accepted}

            return predicted

        return {name: method(name) for name in predictions}

    def check(self, row: Row, results: list[Result]) -> None:
        """Refuse texts that a prediction changes."""
        for result in results:
            if result["text"] != results[0]["text"]:
                raise RuntimeError(f"text {row.key['index']}, prediction {result['method']}: other tokens")

    def tables(self, results: list[Result]) -> Iterable[Table]:
        lines = []
        for temperature, of in grouped(results, "temperature").items():
            texts = {
                name: [_measured(each) for each in grouped(named, "index").values()]
                for name, named in grouped(of, "method").items()
            }
            for name in (WITHOUT, RIGHT, EDITED):
                found = summary(texts[name], texts[WITHOUT])
                least = "-" if found["least_ratio"] is None else f"{found['least_ratio']:.2f}"
                times = spread(found["time_ratios"], 2, " x")
                cells = [f"{found['compression']:.2f}", f"{found['ratio']:.2f}", least, times]
                lines.append([f"{temperature:g}", name, *cells, f"{found['accepted']:.0%}"])
        yield Table(HEADS, lines)


def _measured(rounds: list[Result]) -> Measured:
    """Put the rounds of one text with one prediction together: medians of S and time; all accepted alike."""
    return Measured(
        compression=median(each["tokens"] / each["steps"] for each in rounds),
        decode_s=median(values(rounds, "decode_s")),
        accepted=rounds[0]["accepted"],
    )
