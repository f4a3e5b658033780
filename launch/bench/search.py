"""Search for the fastest fixed W, N, G, compare it with the adaptive decoder, and estimate the gain of more ranks.

S: generated tokens per decode step. Step tokens: tokens of one decode step's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from lp.budget.step_times import StepTimes
from lp.config import LookaheadConfig
from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput
from lp.waits import Wait, waiting

from ..config.builders import PLAIN
from .alternation import Measured, alternate
from .totals import Total

ADAPTIVE = "adaptive"
BUDGETS = (4, 8, 16, 32, 64, 104)  # G at N = 2
PAYS = 1.02  # times the speed without it: a further rank that brings less is not worth its power


@dataclass(frozen=True, kw_only=True)
class SettingResult(Total):
    """The totals of one decoder setting over all prompts; `method` is the setting's name, as in "W=4 N=3 G=8 depth=2".

    Attributes:
        config: the decoder's config; None for plain decoding.
    """

    config: LookaheadConfig | None

    def as_dict(self) -> dict[str, Any]:
        """The setting and its figures by name, as they are written to tune.json."""
        return {
            "name": self.method,
            "config": self.config and asdict(self.config),
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_a_step": self.tokens_a_step,
            "seconds": self.decode_s,
            "S": self.compression,
            "tokens_per_s": self.tokens_per_s,
        }


Run = Callable[[Decoder, list[int]], GenerationOutput]
Build = Callable[[LookaheadConfig], Decoder]
FromRank0 = Callable[[Any], Any]  # rank 0's value on every rank


def time_settings(
    settings: Mapping[str, LookaheadConfig | None], decoders: Mapping[str, Decoder], run: Run,
    prompts: Sequence[list[int]], rounds: int, from_rank_0: FromRank0, wait: Wait | None = None,
) -> list[SettingResult]:  # fmt: skip
    """Time decoder settings on every prompt, in alternation; all ranks get rank 0's times, so that they choose alike.

    Args:
        settings: config of each setting's decoder, by the setting's name; None for plain decoding.
        decoders: decoder of each setting, by the setting's name.
        run: continues a prompt once; called with a decoder and the prompt's token ids.
        prompts: token ids of each prompt.
        rounds: how often each setting runs on a prompt; the median counts.
        from_rank_0: returns on every rank the value that rank 0 passes to it.
        wait: progress display that counts the finished runs; None: nothing is displayed.
    """
    runs: dict[str, list[Measured]] = {name: [] for name in settings}
    for ids in prompts:
        measured = alternate({name: partial(run, decoders[name], ids) for name in settings}, rounds, wait=wait)
        for name, taken in measured.items():
            runs[name].append(taken)
    totals = {name: Total.of_runs(name, taken) for name, taken in runs.items()}
    sums = {
        name: (t.tokens, t.steps, _step_tokens(settings[name], runs[name]), t.decode_s) for name, t in totals.items()
    }
    return [
        SettingResult(
            method=name,
            config=settings[name],
            prompts=len(prompts),
            tokens=tokens,
            steps=steps,
            step_tokens=step_tokens,
            decode_s=decode_s,
        )
        for name, (tokens, steps, step_tokens, decode_s) in from_rank_0(sums).items()
    ]


def search(
    build: Build,
    plain: Decoder,
    adaptive: Decoder,
    run: Run,
    prompts: Sequence[list[int]],
    rounds: int,
    from_rank_0: FromRank0,
    pool: Mapping[str, Any],
) -> list[SettingResult]:
    """Find the fastest fixed setting, and compare it with the adaptive decoder and plain decoding.

    1. Try token budgets without a lookahead window.
    2. Around the best budget, change window, n-gram size and draft depth, one at a time.
    3. Run the best fixed setting, the adaptive decoder and plain decoding once more, in alternation.

    Args:
        build: makes a decoder from its config.
        plain: the decoder for plain decoding, one token per step.
        adaptive: the adaptive decoder.
        run: continues a prompt once; called with a decoder and the prompt's token ids.
        prompts: token ids of each prompt.
        rounds: how often each setting runs on a prompt; the median counts.
        from_rank_0: returns on every rank the value that rank 0 passes to it.
        pool: fields of LookaheadConfig that every setting shares, as in {"pool_mib": 64}.

    Returns:
        The results of all settings; the last three are those of point 3, in the order in which it names them.
    """
    base = LookaheadConfig(window_size=0, ngram_size=2, **pool)
    first = _named([replace(base, guess_set_size=g) for g in BUDGETS])
    settings = len(first) + len(_around(base)) + len(_beside(base, pool))
    with waiting("trying settings in alternation", settings * len(prompts) * rounds, "runs") as wait:
        timed = partial(time_settings, run=run, prompts=prompts, rounds=rounds, from_rank_0=from_rank_0, wait=wait)
        tried = timed(first, {name: build(c) for name, c in first.items()})
        second = _named(_around(_fastest(tried)))
        tried += timed(second, {name: build(c) for name, c in second.items()})[1:]
        best = _fastest(tried)
        decoders = {_name(best): build(best), ADAPTIVE: adaptive, PLAIN: plain}
        return tried + timed(_beside(best, pool), decoders)


def _around(best: LookaheadConfig) -> list[LookaheadConfig]:
    """The best token budget, and settings that differ from it in one thing."""
    return [
        best,
        *(replace(best, window_size=w) for w in (2, 8, 16)),
        replace(best, window_size=4, ngram_size=3, guess_set_size=max(best.guess_set_size // 2, 1)),
        replace(best, draft_depth=12),
    ]


def _beside(best: LookaheadConfig, pool: Mapping[str, Any]) -> dict[str, LookaheadConfig | None]:
    """The best fixed setting and the two that it is compared with."""
    return {_name(best): best, ADAPTIVE: LookaheadConfig(adaptive=True, **pool), PLAIN: None}


def _named(settings: Sequence[LookaheadConfig]) -> dict[str, LookaheadConfig]:
    return {_name(c): c for c in settings}


def _name(c: LookaheadConfig) -> str:
    return f"W={c.window_size} N={c.ngram_size} G={c.guess_set_size} depth={c.depth}"


def _step_tokens(config: LookaheadConfig | None, runs: Iterable[Measured]) -> int:
    """Sum over all decode steps of their tokens on all ranks together: root or window, and draft."""
    levels = config.ngram_size - 2 if config else 0
    steps = (step for run in runs for step in run.output.step_stats)
    return sum(step.num_draft + max(step.columns, 1) + step.columns * levels for step in steps)


def _fastest(tried: Sequence[SettingResult]) -> LookaheadConfig:
    best = max(tried, key=lambda setting: setting.tokens_per_s).config
    assert best is not None
    return best


def speed_of_ranks(step_times: StepTimes, points: Sequence[tuple[float, float]], most: int = 16) -> list[float]:
    """Estimate the tokens/s of 1, 2, ... ranks that share each step, from one rank's step times; exchange is left out.

    Args:
        step_times: seconds of one rank's decode step by its number of tokens.
        points: measured pairs of (step tokens, S), between which S is interpolated; S is generated tokens per step.
        most: largest number of ranks.

    Returns:
        Tokens/s at the best step size, for 1 rank, 2 ranks and so on.
    """
    step_tokens, measured = zip(*sorted([(1.0, 1.0), *points]), strict=True)
    sizes = np.arange(1, int(max(step_tokens)) + 1)
    compression = np.interp(np.log2(sizes), np.log2(step_tokens), measured)
    speeds = []
    for ranks in range(1, most + 1):
        seconds = [step_times.step_s(1 + ceil((size - 1) / ranks)) for size in sizes]
        speeds.append(float((compression / seconds).max()))
    return speeds


def ranks_that_pay(speeds: Sequence[float]) -> int:
    """Largest number of ranks worth having: one more rank would raise the speed by less than 2% (PAYS).

    Args:
        speeds: tokens/s of 1, 2, ... ranks.
    """
    return next((i for i in range(1, len(speeds)) if speeds[i] < PAYS * speeds[i - 1]), len(speeds))
