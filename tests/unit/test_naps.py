"""What the adaptive budget makes of the last steps: what it believes, and when it leaves steps plain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from itertools import count

import torch

import lp
from lp.budget.policy import CAUTION, HOT_NAP, LEAST_TRUE, LESSON, RETRIAL, SHORTEST_NAP, TRIAL, AdaptiveBudget
from lp.budget.step_times import StepTimes, flat
from lp.draft.tree import DraftTree
from lp.sampling.sampler import Sampler, build_sampler
from tests.tiny_models import tiny_model

NOTHING = DraftTree(0)
NEW = count(10_000)  # tokens that no text had
LOSING = StepTimes((1, 120), (1.08, 30.0), 1.0)  # guessing alone costs 8 %


def test_belief_comes_back_without_rows() -> None:
    """Chances that are not believed keep every row out, and without rows nothing shows that they are true again."""
    budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), StepTimes((1, 100), (0.01, 0.31), 0.01))
    tree = DraftTree(20)
    tree.add_path([1] * 20)
    tree.accept_probs = [0.99] * 20
    for _ in range(9):
        budget.observe([2], 21, tree)
    lowest = budget.price.calibration
    for _ in range(40):
        budget.observe([2], 1, NOTHING)
    assert LEAST_TRUE == lowest < 0.4 and budget.price.calibration > 0.9


def test_rows_cost_more_than_their_time_and_teach() -> None:
    """The rows that look best are less likely than they look; what they teach is worth nothing where nothing comes."""
    budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), StepTimes((1, 100), (0.01, 0.02), 0.01))
    assert (budget.price.tokens_per_s, budget.price.exploration_bonus) == (
        CAUTION * budget.rate,
        LESSON,
    ) and CAUTION > 1
    _steps(budget, range(12))
    assert budget.price.exploration_bonus < LESSON / 2
    for _ in range(12):
        budget.observe([1] * 9, 9, NOTHING)
    assert budget.price.exploration_bonus == LESSON, "a lesson is worth no more than that"


def test_what_held_is_believed_to_hold() -> None:
    """A path is not believed far beyond what the last steps accepted."""
    budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), StepTimes((1, 100), (0.01, 0.02), 0.01))
    risks = [budget.price.depth_discount]
    for accepted in (0, 0, 24, 0, 0, 0):
        budget.observe([1] * (accepted + 1), 30, NOTHING)
        risks.append(budget.price.depth_discount)
    assert risks[:3] == [1 / 8] * 3 and risks[3] == 1 / 32 < risks[4] < risks[5] < risks[6] < 1 / 8


def _steps(budget: AdaptiveBudget, tokens: Sequence[int]) -> int:
    """Steps of a token each, in which nothing is accepted; how many were not plain."""
    tried = 0
    for token in tokens:
        tried += not budget.idle
        budget.observe([token], 0 if budget.idle else max(budget.columns, 1), NOTHING)
    return tried


def test_what_does_not_pay_is_left_plain() -> None:
    """On text that nobody can guess every try is lost: few may be made, and they must be made."""
    budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), LOSING)
    assert 40 < _steps(budget, range(1000)) < 100
    at = 1000
    while budget.idle:
        at += 1
        budget.observe([at], 0, NOTHING)
    for _ in range(40):
        assert not budget.idle, "what pays again is used again"
        budget.observe([1] * 4, 5, NOTHING)
    assert budget.rate > 3 * 0.3
    while not budget.idle:
        at += 1
        budget.observe([at], max(budget.columns, 1), NOTHING)
    naps = 0
    while budget.idle:
        naps += 1
        budget.observe([at + naps], 0, NOTHING)
    assert naps == SHORTEST_NAP, "a long success makes up for the naps before it"


def test_what_is_said_again_ends_a_nap() -> None:
    """A loop that begins while nothing is guessed is seen at its fourth token."""
    budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), LOSING)
    _steps(budget, range(150))
    while not budget.idle:
        _steps(budget, [next(NEW)])
    loop = [5, 6, 7, 8, 9]
    for token in loop[:3]:
        _steps(budget, [token])
    assert budget.idle
    _steps(budget, loop[3:4])
    assert not budget.idle
    for _ in range(40):
        budget.observe([next(NEW)] * 4, 5, NOTHING)
    ahead, fails = deepcopy(budget), 0
    while not ahead.idle:
        fails += 1
        _steps(ahead, [next(NEW)])
    _steps(budget, [*(next(NEW) for _ in range(fails - 3)), *loop[:3]])
    assert budget.idle
    _steps(budget, loop[3:4])
    assert not budget.idle, "the last one led somewhere"


def test_what_is_said_again_and_leads_nowhere() -> None:
    """Of four letters any text says something again all the time: an echo that was tried in vain is not followed."""
    drawn = random.Random(0)
    for letters in (4, 10):
        budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), LOSING)
        tried = _steps(budget, [drawn.randrange(letters) for _ in range(3000)])
        assert 40 < tried < 300


def test_a_loss_is_borne_while_something_is_accepted() -> None:
    """Steps that lose a tenth but accept something teach what pays later."""
    budgets = [AdaptiveBudget(lp.LookaheadConfig(adaptive=True), StepTimes((1, 120), (1.2, 1.3), 1.0)) for _ in "ab"]
    naps = [False, False]
    for at in range(40):
        for which, new in enumerate(([at], [-at] * (1 + (at % 8 == 0)))):
            budgets[which].observe(new, 0 if budgets[which].idle else 1, NOTHING)
            naps[which] |= budgets[which].idle
    assert naps == [True, False]


def test_hot_text_begins_plain() -> None:
    """At a high temperature there is nothing to guess until the text shows otherwise."""
    config = lp.LookaheadConfig(adaptive=True)
    warm, hot = (AdaptiveBudget(config, LOSING, 1, temperature) for temperature in (1.0, 2.0))
    assert not warm.idle and hot.idle
    assert _steps(hot, range(HOT_NAP)) == 0
    for budget, trial, nap in ((warm, TRIAL, SHORTEST_NAP), (hot, RETRIAL, HOT_NAP)):
        assert _steps(budget, range(100, 100 + trial)) == trial and budget.idle
        assert _steps(budget, range(200, 200 + nap)) == 0 and not budget.idle


def _sampler(sampling: lp.SamplingParams | None) -> Sampler:
    return build_sampler(sampling, (), vocabulary=8, dtype=torch.float32, device=torch.device("cpu"))


def test_hot_is_what_samples_from_all_tokens() -> None:
    """Where processors leave few tokens to choose from there is something to guess at any temperature."""
    asked = {None: 0.0, lp.SamplingParams(seed=0): 1.0, lp.SamplingParams(seed=0, temperature=2.0): 2.0}
    asked |= {lp.SamplingParams(seed=0, temperature=2.0, min_p=0.2): 0.0}
    for sampling, heat in asked.items():
        assert _sampler(sampling).full_vocabulary_temperature == heat


def test_columns_are_weighed_beside_every_tree() -> None:
    """Steps of one row and steps of seven are four on average, beside which two columns look free here."""
    curve = StepTimes((1, 2, 8, 120), (1.0, 1.3, 1.3, 40.0), 1.0)
    tree = DraftTree(6)
    tree.add_path([1] * 6)
    tree.accept_probs = [0.9] * 6
    chosen = []
    for trees in ([tree, tree], [tree, NOTHING]):
        budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), curve)
        for step in range(40):
            taken = trees[step % 2]
            budget.observe([1] * 3, 1 + len(taken), taken)
        chosen.append(budget.columns)
    assert chosen == [2, 0]


def test_a_column_may_take_the_place_of_a_poor_row() -> None:
    """The tree was cut to fit beside the last window; beside another it would be cut elsewhere."""
    budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), StepTimes((1, 2, 8, 9, 120), (1, 1.3, 1.3, 9, 90), 1.0))
    tree = DraftTree(7)
    tree.add_path([1] * 7)
    tree.accept_probs = [0.9] * 6 + [0.01]
    for _ in range(40):
        budget.observe([1] * 3, 8, tree)
    assert budget.columns == 2


def test_a_decoder_knows_of_heat() -> None:
    """Hot text begins plain by itself, and no window is computed meanwhile."""
    model, config, hot = tiny_model(), lp.LookaheadConfig(adaptive=True), lp.SamplingParams(temperature=2.0, seed=1)
    decoder = lp.LookaheadDecoder(model, config, curve=flat(0.01, 120))
    for sampling, plain in ((hot, HOT_NAP), (None, 0)):
        steps = decoder.generate([1, 2, 3], HOT_NAP + 9, sampling, eos_token_id=()).step_stats
        assert [step.idle for step in steps[: plain + 1]] == [True] * plain + [False]
    assert (
        AdaptiveBudget(config, flat(0.01, 120), 1, 2.0).columns == 0 < AdaptiveBudget(config, flat(0.01, 120)).columns
    )
