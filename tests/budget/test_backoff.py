"""Back-off: steps are plain while lookahead does not pay; a repeated run of tokens, or time, ends that."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

import lp
from lp.budget.backoff import (
    FIRST_TRIAL_STEPS,
    HIGH_TEMPERATURE_BACK_OFF,
    MOST_BEHIND,
    PLAIN_STEPS_PER_LOSS,
    SHORTEST_BACK_OFF,
    TRIAL_STEPS,
    BackOff,
)
from lp.budget.calibration import DraftRecord
from lp.budget.policy import AdaptiveBudget, Company
from lp.budget.step_times import StepTimes
from lp.sampling.sampler import build_sampler
from tests.support.tiny_models import tiny_model

ADAPTIVE = lp.LookaheadConfig(adaptive=True)
NOTHING = DraftRecord()
NEW = itertools.count(10_000)  # tokens that no text had
LOSING = StepTimes((1, 120), (1.08, 30.0), 1.0)  # a step that is not plain loses 8 %


def _steps(budget: AdaptiveBudget, tokens: Sequence[int]) -> int:
    """Steps of one token each, in which nothing is accepted; returns how many were not plain."""
    tried = 0
    for token in tokens:
        tried += not budget.idle
        budget.record_step([token], 0 if budget.idle else max(budget.columns, 1), NOTHING)
    return tried


def test_steps_are_plain_where_lookahead_does_not_pay() -> None:
    """On random text every trial is lost: few may be made, and some must be."""
    budget = AdaptiveBudget(ADAPTIVE, LOSING)
    assert 40 < _steps(budget, range(1000)) < 100
    at = 1000
    while budget.idle:
        at += 1
        budget.record_step([at], 0, NOTHING)
    for _ in range(40):
        assert not budget.idle, "what pays again is used again"
        budget.record_step([1] * 4, 5, NOTHING)
    assert budget.tokens_per_s > 3 * 0.3
    while not budget.idle:
        at += 1
        budget.record_step([at], max(budget.columns, 1), NOTHING)
    plain_steps = 0
    while budget.idle:
        plain_steps += 1
        budget.record_step([at + plain_steps], 0, NOTHING)
    assert plain_steps == SHORTEST_BACK_OFF, "a long success makes the next back-off short again"


def test_time_is_compared_with_plain_steps() -> None:
    """Seconds are a machine's: the same losses count as much where all is a thousand times as fast."""
    tried = []
    for scale in (1.0, 1e-3):
        times = StepTimes((1, 120), (1.08 * scale, 30.0 * scale), scale)
        tried.append(_steps(AdaptiveBudget(ADAPTIVE, times), range(1000)))
    assert tried[0] == tried[1]


@pytest.mark.parametrize(("rate", "pays"), [(0.84, False), (0.93, True)])
def test_accepted_tokens_lower_the_rate_that_is_asked_for(rate: float, pays: bool) -> None:
    """With one token accepted in eight steps, about 0.89 of plain decoding's rate must be reached."""
    back_off = BackOff(0.0)
    assert FIRST_TRIAL_STEPS == 8
    for new_tokens in (1, 1, 1, 1, 2, 1, 1, 1):
        back_off.record_step([next(NEW) for _ in range(new_tokens)], 9 / 8 / rate)
    assert back_off.idle is not pays


def test_a_back_off_is_twice_as_long_as_the_one_before() -> None:
    """Up to the longest: a long text would otherwise never be tried again, or tried all the time."""
    back_off, lengths = BackOff(0.0), [0] * 7
    for number in range(7):
        while not back_off.idle:
            back_off.record_step([next(NEW)], 1.06)
        while back_off.idle:
            back_off.record_plain_step([next(NEW)])
            lengths[number] += 1
    assert lengths == [4, 8, 16, 32, 64, 64, 64]


@pytest.mark.parametrize("plain_steps", [1.05, 1.5, 2.5])
def test_a_text_falls_little_behind_plain_decoding(plain_steps: float) -> None:
    """However much a step loses, all of them together lose MOST_BEHIND and one step, and little more in a long text."""
    back_off, lost, repeats = BackOff(0.0), 0.0, itertools.cycle(range(6))
    for number in range(4000):
        token = next(repeats) if number % 40 < 20 else next(NEW)
        if back_off.idle:
            back_off.record_plain_step([token])
        else:
            back_off.record_step([token], plain_steps)
            lost += plain_steps - 1
        assert lost <= MOST_BEHIND + plain_steps - 1 + number / PLAIN_STEPS_PER_LOSS
    assert lost > MOST_BEHIND + 4, "a long text is tried again from time to time"


def test_a_text_that_is_ahead_may_lose_what_it_gained() -> None:
    """What counts is the whole text: a gain of 20 steps leaves room for losses."""
    back_off = BackOff(0.0)
    for _ in range(20):
        back_off.record_step([next(NEW), next(NEW)], 1.0)
    losing = 0
    while not back_off.idle:
        back_off.record_step([next(NEW)], 1.5)
        losing += 1
    assert 0.5 * losing > MOST_BEHIND


def test_texts_that_take_steps_together_are_tried_less() -> None:
    """A step of one text that is tried in vain delays the other three."""
    budget = AdaptiveBudget(ADAPTIVE, LOSING, texts=4)
    budget.company = Company(texts=4, other_tokens=3, tokens_per_s=4.0)
    tried = [bool(_steps(budget, [token])) for token in range(FIRST_TRIAL_STEPS // 4 + 4 * SHORTEST_BACK_OFF + 1)]
    assert tried == [True] * (FIRST_TRIAL_STEPS // 4) + [False] * (4 * SHORTEST_BACK_OFF) + [True]


LOOP = [5, 6, 7, 8, 9]


def _after_a_repeat() -> AdaptiveBudget:
    """A loop has ended a back-off, and the trial after it was a success."""
    budget = AdaptiveBudget(ADAPTIVE, LOSING)
    _steps(budget, range(150))
    while not budget.idle:
        _steps(budget, [next(NEW)])
    for token in LOOP[:3]:
        _steps(budget, [token])
    assert budget.idle
    _steps(budget, LOOP[3:4])
    assert not budget.idle
    for _ in range(40):
        budget.record_step([next(NEW)] * 4, 5, NOTHING)
    return budget


def test_a_repeat_ends_a_back_off() -> None:
    """A loop that begins in a back-off is noticed at its fourth token."""
    ahead, fails = _after_a_repeat(), 0
    while not ahead.idle:
        fails += 1
        _steps(ahead, [next(NEW)])
    budget = _after_a_repeat()
    _steps(budget, [*(next(NEW) for _ in range(fails - 3)), *LOOP[:3]])
    assert budget.idle
    _steps(budget, LOOP[3:4])
    assert not budget.idle, "the trial after the last repeat was a success"


def test_repeats_that_did_not_pay_are_ignored() -> None:
    """A text of four letters repeats itself all the time: after a trial in vain repeats end no back-off."""
    drawn = random.Random(0)
    for letters in (4, 10):
        budget = AdaptiveBudget(ADAPTIVE, LOSING)
        tried = _steps(budget, [drawn.randrange(letters) for _ in range(3000)])
        assert 40 < tried < 300


def test_a_loss_is_accepted_while_drafts_are() -> None:
    """Steps that lose a tenth but accept something learn what pays later."""
    budgets = [AdaptiveBudget(ADAPTIVE, StepTimes((1, 120), (1.2, 1.3), 1.0)) for _ in "ab"]
    backed_off = [False, False]
    for at in range(40):
        for which, new in enumerate(([at], [-at] * (1 + (at % 8 == 0)))):
            budgets[which].record_step(new, 0 if budgets[which].idle else 1, NOTHING)
            backed_off[which] |= budgets[which].idle
    assert backed_off == [True, False]


def test_a_text_of_high_temperature_begins_plain() -> None:
    """At a high temperature there is nothing to guess until the text shows otherwise."""
    low, high = (AdaptiveBudget(ADAPTIVE, LOSING, 1, temperature) for temperature in (1.0, 2.0))
    assert not low.idle and high.idle
    assert _steps(high, range(HIGH_TEMPERATURE_BACK_OFF)) == 0
    cases = ((low, FIRST_TRIAL_STEPS, SHORTEST_BACK_OFF), (high, TRIAL_STEPS, HIGH_TEMPERATURE_BACK_OFF))
    for budget, trial, back_off in cases:
        assert _steps(budget, range(100, 100 + trial)) == trial and budget.idle
        assert _steps(budget, range(200, 200 + back_off)) == 0 and not budget.idle


def test_temperature_counts_where_all_tokens_are_sampled() -> None:
    """Where processors leave few tokens to choose from there is something to guess at any temperature."""
    temperatures = {None: 0.0, lp.SamplingParams(seed=0): 1.0, lp.SamplingParams(seed=0, temperature=2.0): 2.0}
    temperatures |= {lp.SamplingParams(seed=0, temperature=2.0, min_p=0.2): 0.0}
    for sampling, temperature in temperatures.items():
        sampler = build_sampler(sampling, (), vocabulary=8, dtype=torch.float32, device=torch.device("cpu"))
        assert sampler.full_vocabulary_temperature == temperature


def test_a_decoder_passes_its_temperature() -> None:
    """A text of high temperature begins plain, and no window is computed meanwhile."""
    step_times = StepTimes.constant(0.01, 120)
    decoder = lp.LookaheadDecoder(tiny_model(), ADAPTIVE, step_times=step_times)
    high = lp.SamplingParams(temperature=2.0, seed=1)
    for sampling, plain in ((high, HIGH_TEMPERATURE_BACK_OFF), (None, 0)):
        steps = decoder.generate([1, 2, 3], plain + 9, sampling, eos_token_id=()).step_stats
        assert [step.idle for step in steps[: plain + 1]] == [True] * plain + [False]
    assert AdaptiveBudget(ADAPTIVE, step_times, 1, 2.0).columns == 0 < AdaptiveBudget(ADAPTIVE, step_times).columns
