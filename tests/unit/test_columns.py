"""What the adaptive budget leaves for the window, and what the window leaves for candidates."""

from __future__ import annotations

import pytest

import lp
from lp.budget.policy import CAUTION, GAIN, HALF, AdaptiveBudget
from lp.budget.step_times import StepTimes, flat
from lp.draft.tree import DraftTree

NOTHING = DraftTree(0)
ADAPTIVE = lp.LookaheadConfig(adaptive=True)


def _sure(rows: int) -> DraftTree:
    """A tree of one path that is all but certain."""
    tree = DraftTree(rows)
    tree.add_path([1] * rows)
    tree.accept_probs = [0.99] * rows
    return tree


@pytest.mark.parametrize(("window", "ngram"), [(128, 5), (64, 9), (512, 2)])
def test_a_window_leaves_room(window: int, ngram: int) -> None:
    """Where rows are free the largest window wins on its gain alone, with no row left to verify anything."""
    config = lp.LookaheadConfig(adaptive=True, window_size=window, ngram_size=ngram, guess_set_size=128)
    budget = AdaptiveBudget(config, flat(0.01, 512))
    for _ in range(12):
        assert budget.columns > 0 and budget.rows >= min(config.draft_budget, 256)
        budget.observe([1], 512, NOTHING)


def test_columns_do_not_crowd_candidates_out() -> None:
    """Candidates that the curve has no room for beside a window are not to be had at any price."""
    budget = AdaptiveBudget(ADAPTIVE, flat(0.01, 100))
    assert budget.columns == 16
    for _ in range(30):
        budget.observe([1] * 3, 100, _sure(96))
    assert budget.columns == 4 and budget.rows == 96


def test_rows_stay_within_what_is_known() -> None:
    """Past its end compiled code would read a curve's prices from anywhere."""
    for most, rows in ((2, 1), (40, 24), (500, 104)):
        budget = AdaptiveBudget(ADAPTIVE, flat(0.01, most))
        assert budget.rows == rows <= most - max(budget.columns, 1)


def test_columns_are_charged_as_rows_are() -> None:
    """With the margin of candidates: what is believed to be worth its rows is mostly worth a little less."""
    price = 2 * GAIN * 2 / (2 + HALF)  # tokens that two columns bring to steps of two tokens, for one row
    for margin, columns in ((0.9, 2), (CAUTION**0.5, 0)):
        seconds = price / CAUTION / 100 * margin
        dear = StepTimes((1, 2, 3, 100), (0.01, 0.01 + seconds, 0.05, 0.5), 0.01)
        assert AdaptiveBudget(ADAPTIVE, dear).columns == columns


def test_the_rate_is_at_least_plain_decodings() -> None:
    """Steps that lose would make rows look cheap, and lose more."""
    curve = StepTimes((1, 120), (1.08, 30.0), 1.0)
    budget = AdaptiveBudget(ADAPTIVE, curve)
    for token in range(5):
        budget.observe([token], 40, _sure(39))
    assert budget.rate == 1 / curve.plain_s
