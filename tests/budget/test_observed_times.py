"""Step times learned from the steps of texts: what corrects them, what does not, and that all ranks take rank 0's."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import lp
from lp.budget.explain import describe_origin
from lp.budget.observed_times import Estimate, TimedStep
from lp.budget.policy import AdaptiveBudget
from lp.budget.prior import prior_times
from lp.budget.step_times import StepTimes
from lp.budget.step_times_cache import read_estimate
from lp.engine.step_timing import KnownStepTimes
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def given_step_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests have step times of their own, in a cache folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


TIMES = StepTimes((1, 4, 16, 64), (0.010, 0.012, 0.014, 0.020), 0.009)


def _steps(times: StepTimes, sizes: Mapping[int, int], noise: float = 0.0, slow: float = 1.0) -> list[TimedStep]:
    """So many steps of each size, 0 for plain ones, which take their time by `times`, shuffled."""
    rng = random.Random(0)
    steps = []
    for size, count in sizes.items():
        seconds = slow * (times.step_s(size) if size else times.plain_s)
        steps += [TimedStep(size, seconds * rng.uniform(1, 1 + noise)) for _ in range(count)]
    rng.shuffle(steps)
    return steps


def _ratio(times: StepTimes, size: int) -> float:
    """How many times as long as a plain step a step of this size takes, by what was learned."""
    return times.step_s(size) / times.plain_s


def test_a_wrong_guess_is_corrected() -> None:
    """A plain step of 2.3 x what a step of a token takes was once kept for ever; now the first steps correct it."""
    estimate = Estimate.of_prior(StepTimes((1, 4, 16, 64), (0.010, 0.012, 0.045, 0.020), 0.023))
    for _ in range(6):
        estimate = estimate.after(_steps(TIMES, {0: 12, 1: 4, 4: 8, 16: 4, 64: 4}, noise=0.1))
    for size in (1, 4, 16, 64):
        assert _ratio(estimate.times, size) == pytest.approx(_ratio(TIMES, size), rel=0.1)
    assert estimate.steps == 6 * 32 and estimate.doubts.max() < 0.06


def test_sizes_that_were_not_taken_follow_their_neighbours() -> None:
    """A prior that is too cheap everywhere is found out by small steps, before a large one is lost."""
    cheap = Estimate.of_prior(StepTimes((1, 4, 8, 16, 64), (0.010, 0.010, 0.010, 0.010, 0.010), 0.010))
    dear = StepTimes((1, 4, 8, 16, 64), (0.010, 0.020, 0.025, 0.030, 0.060), 0.010)
    learned = cheap.after(_steps(dear, {0: 16, 8: 16}))
    assert _ratio(learned.times, 8) == pytest.approx(2.5, rel=0.15)
    assert 1.2 < _ratio(learned.times, 4) < 2.3 and _ratio(learned.times, 64) > 1.8
    assert learned.doubts[4] > learned.doubts[3] > learned.doubts[2], "the farther, the more doubtful"
    assert (learned.doubts < cheap.doubts).all()


@pytest.mark.parametrize("slow", [0.3, 1.0, 3.0])
def test_a_busy_machine_changes_no_ratio(slow: float) -> None:
    """It slows all steps down, and no decision depends on that."""
    before = Estimate.of_prior(TIMES)
    after = before.after(_steps(TIMES, {0: 12, 4: 12, 64: 8}, noise=0.05, slow=slow))
    for size in (1, 4, 16, 64):
        assert _ratio(after.times, size) == pytest.approx(_ratio(TIMES, size), rel=0.06)


def test_steps_of_one_size_say_nothing_of_the_others() -> None:
    """A text of plain steps would make every size look known."""
    before = Estimate.of_prior(TIMES)
    after = before
    for _ in range(20):
        after = after.after(_steps(TIMES, {0: 32}, slow=2.0))
    assert after.doubts == pytest.approx(before.doubts, rel=0.05)
    assert _ratio(after.times, 16) == pytest.approx(_ratio(TIMES, 16), rel=0.05)


def test_a_single_step_that_was_disturbed_is_hardly_believed() -> None:
    """A process that was put to sleep in a step of 16 tokens would never take one again."""
    known = Estimate.of_prior(TIMES)
    for _ in range(4):
        known = known.after(_steps(TIMES, {0: 12, 1: 4, 4: 8, 16: 4, 64: 4}, noise=0.1))
    disturbed = known.after([*_steps(TIMES, {0: 20, 4: 11}, noise=0.1), TimedStep(16, 30 * TIMES.step_s(16))])
    assert _ratio(disturbed.times, 16) < 1.15 * _ratio(known.times, 16)
    slower = StepTimes(TIMES.num_tokens, (0.010, 0.012, 0.042, 0.042), TIMES.plain_s)
    really = known
    for _ in range(16):
        really = really.after(_steps(slower, {0: 16, 16: 16}, noise=0.1))
    assert _ratio(really.times, 16) == pytest.approx(0.042 / 0.009, rel=0.15), "what stays slow is believed"


def test_impossible_seconds_are_left_out() -> None:
    """A clock that was set back, and steps larger than any that is known."""
    known = Estimate.of_prior(TIMES)
    assert (
        known.after([TimedStep(4, -1.0), TimedStep(4, 0.0), TimedStep(4, float("inf")), TimedStep(999, 1.0)]) is known
    )
    assert known.after([]) is known


def test_noisier_steps_leave_more_doubt() -> None:
    """What is learned beside something else is kept, and says how little it is worth."""
    before = Estimate.of_prior(TIMES)
    doubts = [before.after(_steps(TIMES, {0: 12, 16: 12}, noise)).doubts[2] for noise in (0.02, 3.0)]
    assert doubts[0] < 0.8 * doubts[1] < doubts[1] < before.doubts[2]


def test_doubt_costs_and_pads_nothing() -> None:
    """While it is doubtful a draft token pays by a margin; a small size that nobody took is no reason to pad."""
    flat = Estimate.of_prior(prior_times({1: 0.01, 2: 0.01, 8: 0.01, 48: 0.01}, 128))
    for estimate in (flat, flat.after(_steps(flat.times, {0: 40, 8: 40}))):
        times, careful = estimate.times, estimate.careful
        assert all(careful.padded_size(size) == size for size in range(1, 129))
        assert all(careful.step_s(size) >= times.step_s(size) for size in range(1, 129))
        assert careful.plain_s == times.plain_s
    assert flat.careful.step_s(64) / flat.times.step_s(64) == pytest.approx(np.exp(flat.doubts[11]), rel=1e-6)
    config = lp.LookaheadConfig(adaptive=True)
    bold, shy = AdaptiveBudget(config, flat.times), AdaptiveBudget(config, flat.careful)
    assert (
        np.asarray(shy.price(1, 0).marginal_seconds)[1:60].min()
        > np.asarray(bold.price(1, 0).marginal_seconds)[1:60].max()
    )


def test_a_text_goes_on_by_what_its_steps_took() -> None:
    """Alone, a rank learns within a text: a guess that is far off would cost all of the first one."""
    config = lp.LookaheadConfig(adaptive=True)
    dear = StepTimes(TIMES.num_tokens, (0.011, 0.030, 0.080, 0.400), 0.009)
    estimate = Estimate.of_prior(TIMES)
    taken: list[TimedStep] = []

    def clock(step: TimedStep) -> StepTimes | None:
        nonlocal estimate
        taken.append(step)
        if len(taken) % 8:
            return None
        estimate = estimate.after(taken[-8:])
        return estimate.careful

    budget = AdaptiveBudget(config, estimate.careful, clock=clock)
    before = np.asarray(budget.price(1, 0).seconds)[16] * budget.tokens_per_s
    for turn in range(40):
        size = (0, 16)[turn % 2]
        budget.observe(size, 5 * (dear.step_s(size) if size else dear.plain_s))
    after = np.asarray(budget.price(1, 0).seconds)[16] * budget.tokens_per_s
    assert before < 2.5 and after == pytest.approx(0.080 / 0.009, rel=0.2), (
        "in plain steps, whatever the machine's load"
    )
    given = AdaptiveBudget(config, TIMES)
    given.observe(16, 9.0)
    assert np.asarray(given.price(1, 0).seconds)[16] == TIMES.step_s(16), "times that a user gave stay"


def test_ranks_take_what_rank_0_learned(tmp_path: Path) -> None:
    """By its own clock each rank would choose another budget; and the file has what was learned."""
    models = [tiny_model(), tiny_model()]

    def body(context: ParallelContext) -> list[StepTimes | None]:
        decoder = lp.LookaheadDecoder(models[context.rank], None, context)
        known = decoder._step_times
        assert isinstance(known, KnownStepTimes)
        found = [known.times, known.careful]
        slow_plain = StepTimes((1, 128), (0.001, 0.02), 0.1 if context.is_main else 0.0001)
        for step in _steps(slow_plain, {0: 32, 4: 32}):
            assert known.observe(step) is None, "within a text ranks decide alike"
        decoder.generate([1, 2, 3], 1)
        return [*found, known.times, known.careful]

    both = run_lockstep(2, body)
    assert both[0] == both[1]
    first, _, after, careful = both[0]
    assert first and after and careful and after.plain_s > 5 * after.step_s(4) and careful.step_s(4) > after.step_s(4)
    (file,) = tmp_path.rglob("*.json")
    stored = read_estimate(file.read_text())
    assert stored and stored.steps


class SlowProcessor(LogitsProcessor):
    """Takes a millisecond for every node."""

    per_branch = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001 * len(scores))
        return scores


def test_processors_of_a_text_leave_the_step_times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a grammar takes for its nodes is not what steps of other texts take."""
    observed: list[TimedStep] = []
    monkeypatch.setattr(KnownStepTimes, "observe", lambda self, step: observed.append(step))
    decoder = lp.LookaheadDecoder(tiny_model())
    decoder.generate([1, 2, 3], 8, logits_processor=[SlowProcessor()])
    assert not observed
    decoder.generate([1, 2, 3], 8, lp.SamplingParams(temperature=0.8, top_p=0.9, seed=0))
    assert observed


class _Sleeps(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return False


@pytest.mark.parametrize("name", ["lookahead", "oracle"])
@pytest.mark.parametrize("slow", ["callback", "criterion"])
def test_what_the_user_runs_leaves_the_step_times_alone(name: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that prints slowly would make every step look alike, and the wrong drafts pay."""
    observed: list[TimedStep] = []
    monkeypatch.setattr(KnownStepTimes, "observe", lambda self, step: observed.append(step))
    model = tiny_model()
    decoder = lp.LookaheadDecoder(model) if name == "lookahead" else lp.AutoregressiveDecoder(model)
    decoder.generate([1, 2, 3], 8)  # compiles
    if slow == "callback":
        output = decoder.generate([1, 2, 3], 3, on_tokens=lambda tokens, step: time.sleep(0.5))
    else:
        output = decoder.generate([1, 2, 3], 3, stopping_criteria=[_Sleeps()])
    assert max(step.seconds for step in output.step_stats) < 0.5
    assert all(step.seconds < 0.5 for step in observed) and bool(observed) == (name == "lookahead")
    assert output.decode_s > 0.5 * output.steps, "the caller waited for it all the same"


def test_a_decoder_says_how_surely_it_knows_its_step_times(tmp_path: Path) -> None:
    """Without it nobody finds the file, or learns that the figures are a guess."""
    model = tiny_model()
    decoder = lp.LookaheadDecoder(model)
    assert f"; estimated from one layer and 0 steps, 1 thread; kept in {tmp_path}" in decoder.explain()
    prior = Estimate.of_prior(StepTimes((1, 8), (0.01, 0.02), 0.01))
    learned = prior.after([TimedStep(num_tokens, 0.01) for num_tokens in (0, 1)] * 20)
    assert "; known within 8 % up to 1 tokens, from 40 steps, 2 threads; kept" in describe_origin(tmp_path, learned, 2)
    with pytest.raises(ValueError, match="step_times is 'again'; give StepTimes, 'measure', or None"):
        lp.LookaheadDecoder(model, step_times="again")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", float("inf")),
        ("covariance", [json.dumps([1e7 * (row == column) for column in range(5)]) for row in range(5)]),
        ("covariance", [json.dumps([10**400] * 5)] * 5),
    ],
)
def test_a_file_edited_to_numbers_beyond_all_bounds_is_not_read(key: str, value: Any) -> None:
    """It would fail each decoder that is made, or a step of its texts."""
    written = Estimate.of_prior(TIMES).as_json()
    assert read_estimate(json.dumps(written)) and read_estimate(json.dumps(written | {key: value})) is None


def test_the_median_of_a_size_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning is part of a decode step: a median for each of its steps would be most of it."""
    calls = []

    def counted(values: list[float]) -> float:
        calls.append(values)
        return statistics.median(values)

    monkeypatch.setattr("lp.budget.observed_times.median", counted)
    Estimate.of_prior(TIMES).after(_steps(TIMES, {0: 16, 1: 16}, noise=0.1))
    assert len(calls) == 3  # of two sizes, and of what their steps deviate by
