"""Calibration, depth discount and exploration bonus: how far the probabilities of a draft tree are trusted."""

from __future__ import annotations

import pytest

import lp
from lp.budget.calibration import EXPLORATION_BONUS, LEAST_CALIBRATION, expected_and_accepted
from lp.budget.policy import PRICE_MARGIN, AdaptiveBudget
from lp.budget.step_times import StepTimes
from lp.draft.tree import DraftTree
from tests.layouts import path_tree

ADAPTIVE = lp.LookaheadConfig(adaptive=True)
NOTHING = DraftTree()


def test_calibration_comes_back_without_draft_tokens() -> None:
    """A low calibration leaves every draft token out, and without them nothing shows that it should rise again."""
    budget = AdaptiveBudget(ADAPTIVE, StepTimes((1, 100), (0.01, 0.31), 0.01))
    tree = path_tree([0.99] * 20)
    for _ in range(9):
        budget.record_step([2], 21, tree)
    lowest = budget.price.calibration
    for _ in range(40):
        budget.record_step([2], 1, NOTHING)
    assert LEAST_CALIBRATION == lowest < 0.4 and budget.price.calibration > 0.9


def test_time_has_a_margin_and_exploration_a_bonus() -> None:
    """Draft tokens that look best are less likely than they look; exploring is worthless where nothing is accepted."""
    budget = AdaptiveBudget(ADAPTIVE, StepTimes((1, 100), (0.01, 0.02), 0.01))
    assert budget.price.tokens_per_s == PRICE_MARGIN * budget.tokens_per_s and PRICE_MARGIN > 1
    assert budget.price.exploration_bonus == EXPLORATION_BONUS
    for token in range(12):
        budget.record_step([token], 0 if budget.idle else max(budget.columns, 1), NOTHING)
    assert budget.price.exploration_bonus < EXPLORATION_BONUS / 2
    for _ in range(12):
        budget.record_step([1] * 9, 9, NOTHING)
    assert budget.price.exploration_bonus == EXPLORATION_BONUS, "it is worth no more than that"


def test_accepted_paths_lower_the_depth_discount() -> None:
    """A path is not trusted far beyond what the last steps accepted."""
    budget = AdaptiveBudget(ADAPTIVE, StepTimes((1, 100), (0.01, 0.02), 0.01))
    discounts = [budget.price.depth_discount]
    for accepted in (0, 0, 24, 0, 0, 0):
        budget.record_step([1] * (accepted + 1), 30, NOTHING)
        discounts.append(budget.price.depth_discount)
    assert discounts[:3] == [1 / 8] * 3 and discounts[3] == 1 / 32 < discounts[4] < discounts[5] < discounts[6] < 1 / 8


def test_expected_and_accepted() -> None:
    """Two branches of which one is true for two tokens; the step's last token is the model's own."""
    tree = DraftTree([5, 6, 7, 8], [-1, -1, 1, 2], [0.2, 0.5, 0.4, 0.1])
    assert expected_and_accepted(tree, [6, 7, 9]) == (pytest.approx(0.7 + 0.8 + 0.25), 2)
    assert expected_and_accepted(tree, [6, 7, 8, 1]) == (pytest.approx(0.7 + 0.8 + 0.25), 3), (
        "nothing is expected behind the end"
    )
    assert expected_and_accepted(tree, [9]) == (pytest.approx(0.7), 0)
    assert expected_and_accepted(DraftTree(), [1]) == (0.0, 0)
