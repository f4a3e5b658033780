"""Step times corrected by the steps of a text: what is moved, what is noise, and that all ranks take rank 0's."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import lp
from lp.budget.measure import Measurement
from lp.budget.observed_times import corrected
from lp.budget.step_times import StepTimes
from lp.budget.step_times_cache import read_step_times
from lp.engine.output import StepStats
from lp.engine.step_timing import KnownStepTimes, StepTimingDecoder
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def given_step_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests have step times of their own, in a cache folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


TIMES = StepTimes((1, 4, 16, 64), (0.010, 0.012, 0.014, 0.020), 0.009)


def _steps(times: StepTimes, sizes: dict[int, int], noise: float = 0.0, slow: float = 1.0) -> list[StepStats]:
    """So many steps of each size, 0 for plain ones, which take their time by `times`, shuffled."""
    rng = random.Random(0)
    steps = []
    for size, count in sizes.items():
        seconds = slow * (times.step_s(size) if size else times.plain_s)
        for _ in range(count):
            taken = seconds * rng.uniform(1, 1 + noise)
            steps.append(StepStats(max(size, 1), 0, 0, taken, 0.0, 0.0, 0, not size, max(size, 1)))
    rng.shuffle(steps)
    return steps


def test_what_was_measured_on_a_busy_machine_is_corrected() -> None:
    """A plain step of 91.92 ms beside steps of 39.57 ms was once kept for ever; now some texts correct it."""
    times = wrong = StepTimes((1, 4, 16, 64), (0.010, 0.012, 0.045, 0.020), 0.090)
    for _ in range(8):
        times = corrected(times, _steps(TIMES, {0: 20, 4: 20, 64: 20}))
    assert times.plain_s / times.step_s(4) == pytest.approx(TIMES.plain_s / TIMES.step_s(4), rel=0.26)
    assert times.step_s(64) / times.step_s(4) == pytest.approx(TIMES.step_s(64) / TIMES.step_s(4), rel=0.26)
    slow_16 = StepTimes(TIMES.num_tokens, (0.010, 0.012, 0.060, 0.100), TIMES.plain_s)
    moved = corrected(slow_16, _steps(TIMES, {1: 20, 16: 30, 64: 20}))
    assert moved.seconds[1] / moved.seconds[0] == pytest.approx(1.2, rel=0.5), "a size between is moved in part"
    half = corrected(wrong, _steps(TIMES, {0: 20, 4: 20}))
    assert half.plain_s / half.step_s(4) == pytest.approx((0.090 / 0.012 * 0.009 / 0.012) ** 0.5, rel=0.01)


@pytest.mark.parametrize(
    ("sizes", "noise", "slow"),
    [
        ({0: 20, 4: 20, 64: 20}, 0.2, 1.0),  # noise
        ({0: 20, 4: 20, 64: 20}, 0.0, 3.0),  # a machine that is busy throughout
        ({0: 30, 4: 7}, 0.0, 1.0),  # one size alone has enough steps
        ({}, 0.0, 1.0),
    ],
)
def test_what_agrees_stays(sizes: dict[int, int], noise: float, slow: float) -> None:
    """Step times that follow every noise would be written and sent to the ranks after every text."""
    assert corrected(TIMES, _steps(TIMES, sizes, noise, slow)) is TIMES


def test_padded_steps_count_as_what_was_computed() -> None:
    """A step of 3 tokens that is padded to 64 tells of 64."""
    padding = StepTimes((1, 4, 64, 128), (0.050, 0.050, 0.020, 0.040), 0.009)
    slow_64 = StepTimes((1, 64, 128), (0.060, 0.060, 0.040), 0.009)
    moved = corrected(padding, _steps(slow_64, {3: 20, 128: 30}))
    assert moved.seconds[3] == 0.040 and moved.seconds[2] == pytest.approx(0.020 * (0.040 / 0.020) ** 0.5, rel=0.01)


def test_ranks_take_what_rank_0_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own clock each rank would choose another budget; and the file has what was learned."""
    model = tiny_model()
    monkeypatch.setattr(StepTimingDecoder, "measure", lambda decoder: Measurement(TIMES, ()))

    def body(context: ParallelContext) -> list[StepTimes | None]:
        decoder = lp.LookaheadDecoder(model, None, context)
        found = [decoder.step_times]
        known = decoder._step_times
        assert known
        known.observe(_steps(TIMES, {0: 20 + 20 * context.rank, 4: 30}, slow=1.0 + context.rank))
        slow_plain = StepTimes(TIMES.num_tokens, TIMES.seconds, 9.0 if context.is_main else 0.001)
        known.observe(_steps(slow_plain, {0: 20, 4: 30}))
        decoder.generate([1, 2, 3], 1)
        return [*found, decoder.step_times]

    both = run_lockstep(2, body)
    assert both[0] == both[1] and both[0][0] == TIMES
    after = both[0][1]
    assert after and after.plain_s > TIMES.plain_s and after.seconds == TIMES.seconds
    (file,) = tmp_path.rglob("*.json")
    assert read_step_times(file.read_text()) == after


class SlowProcessor(LogitsProcessor):
    """Takes a millisecond for every node."""

    per_branch = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001 * len(scores))
        return scores


def test_processors_of_a_text_leave_the_step_times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a grammar takes for its nodes is not what steps of other texts take."""
    times = StepTimes((1, 4, 64, 128), (1e-3,) * 4, 1e-3)
    monkeypatch.setattr(StepTimingDecoder, "measure", lambda decoder: Measurement(times, ()))
    observed: list[int] = []
    monkeypatch.setattr(KnownStepTimes, "observe", lambda self, steps: observed.append(len(steps)))
    decoder = lp.LookaheadDecoder(tiny_model())
    decoder.generate([1, 2, 3], 8, logits_processor=[SlowProcessor()])
    assert not observed
    decoder.generate([1, 2, 3], 8, lp.SamplingParams(temperature=0.8, top_p=0.9, seed=0))
    assert len(observed) == 1


class _Sleeps(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return False


@pytest.mark.parametrize("name", ["lookahead", "oracle"])
@pytest.mark.parametrize("slow", ["callback", "criterion"])
def test_what_the_user_runs_leaves_the_step_times_alone(name: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that prints slowly would make every step look alike, and the wrong drafts pay."""
    times = StepTimes((1, 4, 64, 128), (1e-3,) * 4, 1e-3)
    monkeypatch.setattr(StepTimingDecoder, "measure", lambda decoder: Measurement(times, ()))
    model = tiny_model()
    decoder = lp.LookaheadDecoder(model) if name == "lookahead" else lp.AutoregressiveDecoder(model)
    decoder.generate([1, 2, 3], 8)  # compiles
    if slow == "callback":
        output = decoder.generate([1, 2, 3], 8, on_tokens=lambda tokens, step: time.sleep(0.5))
    else:
        output = decoder.generate([1, 2, 3], 8, stopping_criteria=[_Sleeps()])
    assert max(step.seconds for step in output.step_stats) < 0.5
    assert output.decode_s > 0.5 * output.steps, "the caller waited for it all the same"


def test_a_decoder_says_where_its_step_times_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nobody finds the file, or learns that there is none because the machine was busy."""
    model = tiny_model()
    found = [Measurement(TIMES, (0, 4)), Measurement(TIMES, ()), Measurement(StepTimes.constant(0.01, 9), ())]
    monkeypatch.setattr(StepTimingDecoder, "measure", lambda decoder: found.pop(0))
    assert "not stored, since the machine seemed busy" in (line := lp.LookaheadDecoder(model).explain())
    assert "(steps: plain, 4 tokens)" in line
    assert f"stored in {tmp_path}" in lp.LookaheadDecoder(model).explain()
    assert lp.LookaheadDecoder(model).step_times == TIMES and len(found) == 1
    assert lp.LookaheadDecoder(model, step_times="measure").step_times == StepTimes.constant(0.01, 9)
    assert lp.LookaheadDecoder(model).step_times == StepTimes.constant(0.01, 9)
    with pytest.raises(ValueError, match="step_times is 'again'; give StepTimes, 'measure', or None"):
        lp.LookaheadDecoder(model, step_times="again")
