"""Calibration, depth discount and exploration bonus: how far the probabilities of a draft tree are trusted."""

from __future__ import annotations

import lp
from lp.budget.calibration import EXPLORATION_BONUS, LEAST_CALIBRATION, DraftRecord
from lp.budget.policy import PRICE_MARGIN, AdaptiveBudget
from lp.budget.step_times import StepTimes
from tests.support.layouts import path_tree, record_of

ADAPTIVE = lp.LookaheadConfig(adaptive=True)
NOTHING = DraftRecord()


def test_calibration_comes_back_without_draft_tokens() -> None:
    """A low calibration leaves every draft token out, and without them nothing shows that it should rise again."""
    budget = AdaptiveBudget(ADAPTIVE, StepTimes((1, 100), (0.01, 0.31), 0.01))
    drafts = record_of(path_tree([0.99] * 20), [2])
    for _ in range(40):
        budget.record_step([2] * 4, 1, NOTHING)  # far enough ahead to lose that much
    for _ in range(9):
        budget.record_step([2], 21, drafts)
    lowest = budget.price(1, 0).calibration
    for _ in range(40):
        budget.record_step([2], 1, NOTHING)
    assert LEAST_CALIBRATION == lowest < 0.4 and budget.price(1, 0).calibration > 0.9


def test_time_has_a_margin_and_exploration_a_bonus() -> None:
    """Draft tokens that look best are less likely than they look; exploring is worthless where nothing is accepted."""
    budget = AdaptiveBudget(ADAPTIVE, StepTimes((1, 100), (0.01, 0.02), 0.01))
    assert budget.price(1, 0).tokens_per_s == PRICE_MARGIN * budget.tokens_per_s and PRICE_MARGIN > 1
    assert budget.price(1, 0).exploration_bonus == EXPLORATION_BONUS
    for token in range(12):
        budget.record_step([token], 0 if budget.idle else max(budget.columns, 1), NOTHING)
    assert budget.price(1, 0).exploration_bonus < EXPLORATION_BONUS / 2
    for _ in range(12):
        budget.record_step([1] * 9, 9, NOTHING)
    assert budget.price(1, 0).exploration_bonus == EXPLORATION_BONUS, "it is worth no more than that"


def test_accepted_paths_lower_the_depth_discount() -> None:
    """A path is not trusted far beyond what the last steps accepted."""
    budget = AdaptiveBudget(ADAPTIVE, StepTimes((1, 100), (0.01, 0.02), 0.01))
    discounts = [budget.price(1, 0).depth_discount]
    for accepted in (0, 0, 24, 0, 0, 0):
        budget.record_step([1] * (accepted + 1), 30, NOTHING)
        discounts.append(budget.price(1, 0).depth_discount)
    assert discounts[:3] == [1 / 8] * 3 and discounts[3] == 1 / 32 < discounts[4] < discounts[5] < discounts[6] < 1 / 8
