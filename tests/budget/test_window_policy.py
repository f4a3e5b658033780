"""The window policy: columns are priced like draft tokens, beside the trees of the last steps, and leave them room."""

from __future__ import annotations

import pytest

import lp
from lp.budget.calibration import DraftRecord
from lp.budget.policy import PRICE_MARGIN, AdaptiveBudget
from lp.budget.step_times import StepTimes
from lp.budget.window_policy import HALF_GAIN_COLUMNS, LARGEST_GAIN, WindowPolicy
from tests.support.layouts import path_tree, record_of

NOTHING = DraftRecord()
ADAPTIVE = lp.LookaheadConfig(adaptive=True)


def _likely(num_draft: int) -> DraftRecord:
    """A tree of one path that is all but certain, of which two tokens were accepted."""
    return record_of(path_tree([0.99] * num_draft), [1] * 3)


def _room(budget: AdaptiveBudget, ngram: int = 2) -> int:
    """Draft tokens that a rank may have beside the window."""
    return budget.step_tokens - max(budget.columns, 1) - budget.columns * (ngram - 2)


@pytest.mark.parametrize(("window", "ngram"), [(128, 5), (64, 9), (512, 2)])
def test_a_window_leaves_room(window: int, ngram: int) -> None:
    """Where tokens are free the largest window wins by its gain alone, and no draft token is left to verify."""
    config = lp.LookaheadConfig(adaptive=True, window_size=window, ngram_size=ngram, guess_set_size=128)
    budget = AdaptiveBudget(config, StepTimes.constant(0.01, 512))
    for _ in range(12):
        assert budget.columns > 0 and _room(budget, ngram) >= min(config.draft_budget, 256)
        budget.record_step([1], 512, NOTHING)


def test_columns_do_not_crowd_draft_tokens_out() -> None:
    """Draft tokens that the step times have no room for beside a window cannot be had at any price."""
    budget = AdaptiveBudget(ADAPTIVE, StepTimes.constant(0.01, 100))
    assert budget.columns == 16
    for _ in range(30):
        budget.record_step([1] * 3, 100, _likely(96))
    assert budget.columns == 4 and _room(budget) == 96


def test_draft_tokens_stay_within_the_step_times() -> None:
    """Past the end of the tables compiled code would read prices from anywhere."""
    for max_tokens, room in ((2, 1), (40, 24), (500, 184)):
        budget = AdaptiveBudget(ADAPTIVE, StepTimes.constant(0.01, max_tokens))
        assert _room(budget) == room and budget.step_tokens <= max_tokens


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
        budget.record_step([token], 40, record_of(path_tree([0.99] * 39), [token + 2]))
    assert budget.tokens_per_s == 1 / step_times.plain_s


def test_columns_are_priced_beside_every_tree() -> None:
    """Steps of one token and steps of seven are four on average, beside which two columns look free here."""
    step_times = StepTimes((1, 2, 8, 120), (1.0, 1.3, 1.3, 40.0), 1.0)
    tree = record_of(path_tree([0.9] * 6), [1] * 3)
    chosen = []
    for trees in ([tree, tree], [tree, NOTHING]):
        budget = AdaptiveBudget(ADAPTIVE, step_times)
        for step in range(40):
            used = trees[step % 2]
            budget.record_step([1] * 3, 1 + len(used.accept_probs), used)
        chosen.append(budget.columns)
    assert chosen == [2, 0]


def test_a_column_may_replace_a_poor_draft_token() -> None:
    """The tree was cut to fit beside the last window; beside another it would be cut elsewhere."""
    budget = AdaptiveBudget(ADAPTIVE, StepTimes((1, 2, 8, 9, 120), (1, 1.3, 1.3, 9, 90), 1.0))
    tree = record_of(path_tree([0.9] * 6 + [0.01]), [1] * 3)
    for _ in range(40):
        budget.record_step([1] * 3, 8, tree)
    assert budget.columns == 2


def test_ranks_share_what_a_window_takes() -> None:
    """The window lies on one rank, and draft tokens fill the others up to it: columns are cheaper, never free."""
    step_times = StepTimes((1, 2, 100), (0.01, 0.011, 0.2), 0.01)
    tree = [0.9 * 0.97**at for at in range(60)]
    window = []
    for ranks in (1, 2, 8):
        policy = WindowPolicy(ADAPTIVE, step_times, 50.0, ranks)
        for _ in range(40):
            policy.record_step(tree, 50.0)
        window.append(policy.columns(3.0))
    assert window == sorted(window) and window[0] < window[-1]
    alone = WindowPolicy(ADAPTIVE, StepTimes((1, 2, 100), (0.01, 0.02, 1.0), 0.01), 100.0, 8)
    assert alone.columns(3.0) == 0, "without drafts beside it the largest rank is the window's"


def test_more_ranks_have_room_for_more_columns() -> None:
    """W is a bound of a rank: beside the draft tokens of eight, 64 columns take no larger share than 8 beside one's."""
    flat = StepTimes.constant(0.01, 200)
    assert [AdaptiveBudget(ADAPTIVE, flat, ranks).columns for ranks in (1, 2, 4, 8, 64)] == [16, 32, 64, 64, 64]
    steep = StepTimes((1, 200), (0.01, 1.0), 0.01)
    assert [AdaptiveBudget(ADAPTIVE, steep, ranks).columns for ranks in (1, 8)] == [0, 0]
