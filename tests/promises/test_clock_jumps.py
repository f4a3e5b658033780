"""Clocks that jump: a machine that slept, or whose time was set. They steer what is drafted, and never what is said."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import lp
from lp.budget.observed_times import Estimate, TimedStep
from lp.budget.step_times import StepTimes
from lp.engine.journal import Journal
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.pools import drawn_step_times
from tests.support.tiny_models import drawn_text, tiny_model

CLOCKS = ("perf_counter", "monotonic", "time")
JUMPS_S = (0.0, 1e-9, 3600.0, -3600.0, 1e9, -1e9)


def jump(patch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Every reading of a clock may be hours before or behind the last one, or the same.

    Threads of other tests, such as a server's, keep their time: one that sleeps till a moment of such a clock would do
    so for years.
    """
    others = {*threading.enumerate()} - {threading.current_thread()}
    for name in CLOCKS:
        clock: Callable[[], float] = getattr(time, name)

        def jumped(clock: Callable[[], float] = clock) -> float:
            return clock() + (0.0 if threading.current_thread() in others else rng.choice(JUMPS_S))

        patch.setattr(time, name, jumped)


def test_threads_of_other_tests_keep_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of the same process slept for a thousand million seconds, and the run with it."""
    asked, answers = threading.Event(), list[float]()

    def read() -> None:
        asked.wait()
        answers.extend(time.monotonic() for _ in range(100))

    other = threading.Thread(target=read)
    other.start()
    jump(monkeypatch, random.Random(0))
    asked.set()
    other.join()
    assert max(answers) - min(answers) < 60 < max(abs(time.monotonic() - answers[0]) for _ in range(100))


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


def test_a_step_in_which_the_machine_slept() -> None:
    """An hour in one step: believed, it would make every later text take plain steps, or the largest there are."""
    times = StepTimes((1, 8, 64), (0.010, 0.012, 0.020), 0.009)
    known = Estimate.of_prior(times)
    for size in (0, 1, 8, 64):
        usual = [TimedStep(each, times.step_s(each) if each else times.plain_s) for each in (0, 8) for _ in range(8)]
        after = known.after([*usual, TimedStep(size, 3600.0)]).times
        for each in (1, 8, 64):
            assert 0.8 < after.step_s(each) / after.plain_s / (times.step_s(each) / times.plain_s) < 1.25, (size, each)
