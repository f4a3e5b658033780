"""The window policy: columns are priced like draft tokens, beside the trees of the last steps, and leave them room."""

from __future__ import annotations

import pytest

import lp
from lp.budget.policy import PRICE_MARGIN, AdaptiveBudget
from lp.budget.step_times import StepTimes
from lp.budget.window_policy import HALF_GAIN_COLUMNS, LARGEST_GAIN
from lp.draft.tree import DraftTree
from tests.layouts import path_tree

NOTHING = DraftTree()
ADAPTIVE = lp.LookaheadConfig(adaptive=True)


def _likely(num_draft: int) -> DraftTree:
    """A tree of one path that is all but certain."""
    return path_tree([0.99] * num_draft)


@pytest.mark.parametrize(("window", "ngram"), [(128, 5), (64, 9), (512, 2)])
def test_a_window_leaves_room(window: int, ngram: int) -> None:
    """Where tokens are free the largest window wins by its gain alone, and no draft token is left to verify."""
    config = lp.LookaheadConfig(adaptive=True, window_size=window, ngram_size=ngram, guess_set_size=128)
    budget = AdaptiveBudget(config, StepTimes.constant(0.01, 512))
    for _ in range(12):
        assert budget.columns > 0 and budget.draft_tokens >= min(config.draft_budget, 256)
        budget.record_step([1], 512, NOTHING)


def test_columns_do_not_crowd_draft_tokens_out() -> None:
    """Draft tokens that the step times have no room for beside a window cannot be had at any price."""
    budget = AdaptiveBudget(ADAPTIVE, StepTimes.constant(0.01, 100))
    assert budget.columns == 16
    for _ in range(30):
        budget.record_step([1] * 3, 100, _likely(96))
    assert budget.columns == 4 and budget.draft_tokens == 96


def test_draft_tokens_stay_within_the_step_times() -> None:
    """Past the end of the tables compiled code would read prices from anywhere."""
    for max_tokens, draft_tokens in ((2, 1), (40, 24), (500, 104)):
        budget = AdaptiveBudget(ADAPTIVE, StepTimes.constant(0.01, max_tokens))
        assert budget.draft_tokens == draft_tokens <= max_tokens - max(budget.columns, 1)


def test_columns_are_priced_as_draft_tokens_are() -> None:
    """With the same margin: what looks worth its time is mostly worth a little less."""
    gain = 2 * LARGEST_GAIN * 2 / (2 + HALF_GAIN_COLUMNS)  # tokens by two columns in steps of two, for one more token
    for margin, columns in ((0.9, 2), (PRICE_MARGIN**0.5, 0)):
        seconds = gain / PRICE_MARGIN / 100 * margin
        step_times = StepTimes((1, 2, 3, 100), (0.01, 0.01 + seconds, 0.05, 0.5), 0.01)
        assert AdaptiveBudget(ADAPTIVE, step_times).columns == columns


def test_the_rate_is_at_least_plain_decodings() -> None:
    """Steps that lose would make tokens look cheap, and lose more."""
    step_times = StepTimes((1, 120), (1.08, 30.0), 1.0)
    budget = AdaptiveBudget(ADAPTIVE, step_times)
    for token in range(5):
        budget.record_step([token], 40, _likely(39))
    assert budget.tokens_per_s == 1 / step_times.plain_s


def test_columns_are_priced_beside_every_tree() -> None:
    """Steps of one token and steps of seven are four on average, beside which two columns look free here."""
    step_times = StepTimes((1, 2, 8, 120), (1.0, 1.3, 1.3, 40.0), 1.0)
    tree = path_tree([0.9] * 6)
    chosen = []
    for trees in ([tree, tree], [tree, NOTHING]):
        budget = AdaptiveBudget(ADAPTIVE, step_times)
        for step in range(40):
            used = trees[step % 2]
            budget.record_step([1] * 3, 1 + len(used), used)
        chosen.append(budget.columns)
    assert chosen == [2, 0]


def test_a_column_may_replace_a_poor_draft_token() -> None:
    """The tree was cut to fit beside the last window; beside another it would be cut elsewhere."""
    budget = AdaptiveBudget(ADAPTIVE, StepTimes((1, 2, 8, 9, 120), (1, 1.3, 1.3, 9, 90), 1.0))
    tree = path_tree([0.9] * 6 + [0.01])
    for _ in range(40):
        budget.record_step([1] * 3, 8, tree)
    assert budget.columns == 2
