"""The search for the best fixed setting, what adaptive reaches beside it, and what more ranks would bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from lp.budget.step_times import StepTimes
from lp.config import LookaheadConfig
from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput

from .compare import alternate

PLAIN, ADAPTIVE = "plain decoding", "adaptive"
BUDGETS = (4, 8, 16, 32, 64, 104)  # G at N = 2
PAYS = 1.02  # times the speed without it: a further rank that brings less is not worth its power


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """What one setting did on all prompts.

    Args:
        name: of the setting.
        config: None for plain decoding.
        tokens, steps: generated, and steps taken.
        rows: mean of a step, of all ranks together.
        seconds: of decoding, medians over rounds, summed over prompts.
    """

    name: str
    config: LookaheadConfig | None
    tokens: int
    steps: int
    rows: float
    seconds: float

    @property
    def compression(self) -> float:
        """S."""
        return self.tokens / self.steps

    @property
    def tokens_per_s(self) -> float:
        """Decode speed."""
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return {**asdict(self), "S": self.compression, "tokens_per_s": self.tokens_per_s}


Run = Callable[[Decoder, list[int]], GenerationOutput]
Build = Callable[[LookaheadConfig], Decoder]
Told = Callable[[Any], Any]  # rank 0's value on every rank


def time_settings(
    settings: Mapping[str, LookaheadConfig | None], decoders: Mapping[str, Decoder], run: Run,
    prompts: Sequence[list[int]], rounds: int, told: Told,
) -> list[Tried]:  # fmt: skip
    """Run all of them on every prompt, in alternation; by rank 0's clock, or ranks would choose different ones."""
    totals = {name: [0.0] * 4 for name in settings}
    for ids in prompts:
        measured = alternate({name: partial(run, decoders[name], ids) for name in settings}, rounds)
        for name, taken in measured.items():
            output = taken.output
            rows = sum(step.num_draft + _window_rows(settings[name], step.columns) for step in output.step_stats)
            for place, value in enumerate((len(output.tokens), output.steps, rows, taken.decode_s)):
                totals[name][place] += value
    return [
        Tried(name=n, config=settings[n], tokens=int(t), steps=int(k), rows=r / k, seconds=s)
        for n, (t, k, r, s) in told(totals).items()
    ]


def search(
    build: Build, plain: Decoder, adaptive: Decoder, run: Run, prompts: Sequence[list[int]], rounds: int, told: Told
) -> list[Tried]:
    """Rows first, without a window; then columns, N, depth and K around the best, one at a time; the best fixed one,
    the adaptive budget and plain decoding once more, side by side.

    Returns:
        All settings; the last three are those side by side, the best fixed one first.
    """
    base = LookaheadConfig(window_size=0, ngram_size=2)
    first = {_name(c): c for c in (replace(base, guess_set_size=g) for g in BUDGETS)}
    tried = time_settings(first, {name: build(c) for name, c in first.items()}, run, prompts, rounds, told)
    best = _fastest(tried)
    assert best is not None
    g = best.guess_set_size
    around = [replace(best, window_size=w) for w in (2, 8, 16)]
    around += [replace(best, window_size=4, ngram_size=3, guess_set_size=max(g // 2, 1))]
    around += [replace(best, draft_depth=12), replace(best, num_logits=8)]
    second = {_name(c): c for c in (best, *around)}
    tried += time_settings(second, {name: build(c) for name, c in second.items()}, run, prompts, rounds, told)[1:]
    best = _fastest(tried)
    assert best is not None
    last: dict[str, LookaheadConfig | None] = {_name(best): best, ADAPTIVE: LookaheadConfig(adaptive=True), PLAIN: None}
    decoders = {_name(best): build(best), ADAPTIVE: adaptive, PLAIN: plain}
    return tried + time_settings(last, decoders, run, prompts, rounds, told)


def _name(c: LookaheadConfig) -> str:
    return f"W={c.window_size} N={c.ngram_size} G={c.guess_set_size} depth={c.depth} K={c.num_logits}"


def _window_rows(config: LookaheadConfig | None, columns: int) -> int:
    return max(columns, 1) + columns * (config.ngram_size - 2 if config else 0)


def _fastest(tried: Sequence[Tried]) -> LookaheadConfig | None:
    return max(tried, key=lambda setting: setting.tokens_per_s).config


def speed_of_ranks(step_times: StepTimes, by_rows: Sequence[tuple[float, float]], most: int = 16) -> list[float]:
    """Tokens a second that 1, 2, ... ranks would reach, each with its share of the rows; the exchange not counted.

    Args:
        step_times: of one rank.
        by_rows: (rows, S) as measured.
        most: ranks.
    """
    rows, tokens = zip(*sorted([(1.0, 1.0), *by_rows]), strict=True)
    sizes = np.arange(1, int(max(rows)) + 1)
    compression = np.interp(np.log2(sizes), np.log2(rows), tokens)
    speeds = []
    for ranks in range(1, most + 1):
        seconds = [step_times.step_s(1 + ceil((size - 1) / ranks)) for size in sizes]
        speeds.append(float((compression / seconds).max()))
    return speeds


def ranks_that_pay(speeds: Sequence[float]) -> int:
    """How many there are before the first that raises the speed by less than PAYS."""
    return next((i for i in range(1, len(speeds)) if speeds[i] < PAYS * speeds[i - 1]), len(speeds))
