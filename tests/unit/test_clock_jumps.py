"""Clocks that jump: a machine that slept, or whose time was set. They steer what is drafted, and never what is said."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lp
from lp.budget import measure
from lp.engine.journal import Journal
from lp.engine.step_timing import StepTimingDecoder
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.pools import drawn_step_times
from tests.tiny_models import drawn_text, tiny_model

CLOCKS = ("perf_counter", "monotonic", "time")
JUMPS_S = (0.0, 1e-9, 3600.0, -3600.0, 1e9, -1e9)


def jump(patch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Every reading of a clock may be hours before or behind the last one, or the same."""
    for name in CLOCKS:
        clock: Callable[[], float] = getattr(time, name)
        patch.setattr(time, name, lambda clock=clock: clock() + rng.choice(JUMPS_S))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_text_under_clocks_that_jump(ranks: int, tmp_path: Path, cases: Callable[[int, int], range]) -> None:
    """Times below 0, of 0 and of years: a budget that divides by one, or takes its logarithm, would end the text."""
    model = tiny_model()
    for case in cases(3, 100):
        rng = random.Random(f"clock-{ranks}-{case}")
        ids = drawn_text(rng, 20)
        sampling = lp.SamplingParams(temperature=0.8, seed=case) if case % 2 else None
        expected = lp.AutoregressiveDecoder(model).generate(ids, 30, sampling).tokens
        times = drawn_step_times(rng)

        def body(context: ParallelContext, case: int = case) -> list[list[int]]:
            decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(pool_mib=1), context, step_times=times)  # noqa: B023
            texts = [decoder.generate(ids, 30, sampling).tokens]  # noqa: B023
            texts.append(Journal(tmp_path / f"{case}", context).generate(decoder, ids, 30, sampling).tokens)  # noqa: B023
            outputs = decoder.generate_batch([ids, ids[:9], ids], 30, [sampling, None, sampling])  # noqa: B023
            return [*texts, outputs[0].tokens]

        with pytest.MonkeyPatch.context() as patch:
            jump(patch, rng)
            by_rank = run_lockstep(ranks, body)
        assert by_rank == [[expected] * 3] * ranks


def test_step_times_measured_while_the_machine_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour in one step: stored, it would make every later text take plain steps, or the largest there are."""
    monkeypatch.setattr(measure, "ROUNDS", 2)
    monkeypatch.setattr(measure, "DOUBTS_S", 0.1)
    config = lp.LookaheadConfig(pool_mib=1)
    decoder = lp.LookaheadDecoder(tiny_model(), config, step_times=drawn_step_times(random.Random(1)))
    now = time.perf_counter
    for sleeps_at in range(4, 60, 14):
        readings = iter(range(1_000_000))
        slept_s = [0.0]

        def clock(readings: Any = readings, slept_s: list[float] = slept_s, sleeps_at: int = sleeps_at) -> float:
            slept_s[0] += 3600.0 * (next(readings) == sleeps_at)
            return now() + slept_s[0]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "perf_counter", clock)
            measured = StepTimingDecoder(decoder.runner, config, ParallelContext()).measure()
        assert slept_s[0], "the run has become too short"
        assert measured.doubtful or max(measured.times.seconds) < 60.0, (sleeps_at, measured)
