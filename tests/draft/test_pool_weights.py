"""How the pool's weights are learned, and the oracle that bounds what weights can reach."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from lp.draft.pool.mixture import FEATURES
from lp.draft.source import ShareInput
from lp.draft.window import WindowDrafts
from scripts.studies.pool_ceiling import OraclePool
from scripts.train_pool_weights import Ballots, Loss, RecordingPool, fit
from tests.support.pools import ballot, drawn_step, empty_tables, pool_of


def ballots_of(rows: list[tuple[list[tuple[int, int]], int, int]]) -> Ballots:
    """Ballots of tokens, each given as (votes, candidates, which one came)."""
    votes = np.array([vote for each, _, _ in rows for vote in each], np.int64).reshape(-1, 2)
    sizes = [(len(each), candidates, came) for each, candidates, came in rows]
    return Ballots(votes, *np.array(sizes, np.int64).T)


def test_fit_finds_the_likeliest_weights() -> None:
    """A loss that files a vote under another token or candidate has its least elsewhere, and never says so."""
    # Feature 5 is right 3 times of 4 against "none" with feature 9, beside tokens of other votes and sizes.
    rows = [([(0, 5), (1, 9)], 2, came) for came in (0, 0, 0, 1)]
    rows.insert(2, ([(0, 7), (1, 7), (2, 8)], 3, 1))
    start = np.zeros(FEATURES)
    weights = fit([Loss(ballots_of(rows))], start, ridge=1e-9)
    assert weights[5] - weights[9] == pytest.approx(math.log(3), abs=1e-3)
    assert set(np.flatnonzero(weights)) == {5, 7, 8, 9}
    assert np.abs(fit([Loss(ballots_of(rows))], start + 1, ridge=1e9) - 1).max() < 1e-6, "the ridge draws to the start"


def test_models_count_alike() -> None:
    """A model with more tokens would decide alone what all begin with."""
    many = ballots_of([([(0, 5), (1, 9)], 2, 0)] * 30)
    few = ballots_of([([(0, 5), (1, 9)], 2, 1)])
    weights = fit([Loss(many), Loss(few)], np.zeros(FEATURES), ridge=1e-6)
    assert weights[5] == pytest.approx(weights[9], abs=1e-3)


def test_squares_are_those_of_the_pool() -> None:
    """How far weights move at first depends on them."""
    rows = [([(0, 5), (1, 9)], 2, 0), ([(0, 5), (0, 6), (1, 9)], 2, 1)]
    weights = np.zeros(FEATURES)
    weights[5] = math.log(3)  # 3/4 against 1/4
    squares = Loss(ballots_of(rows)).squares(torch.from_numpy(weights))
    assert squares[5] == pytest.approx(0.25**2 + 0.75**2) and squares[6] == pytest.approx(0.75**2)
    assert squares[9] == pytest.approx(0.25**2 + 0.75**2)


def test_recorded_votes_are_those_before_the_step() -> None:
    """Votes that know the step's own samples teach a pool to trust what it will not have."""
    rng = random.Random(3)
    text = [rng.randrange(20) for _ in range(20)]
    plain = pool_of(text, (1, 2))
    recording = RecordingPool(plain.config, text, (1, 2), empty_tables(plain.config))
    recording.keep(pool_of(text, (1, 2)))
    came_none = 0
    for _ in range(30):
        new, seen = drawn_step(rng, text, 20, 16)
        whole = text + new
        plain._catch_up(whole, len(text))
        expected = [ballot(plain, whole[:end]) for end in range(len(text), len(whole))]
        (kept,) = recording.kept
        before = len(kept)
        recording.observe(whole, len(new), seen)
        plain.observe(whole, len(new), seen)
        for token, own, recorded in zip(new, expected, kept[before:], strict=True):
            assert recorded.votes.tolist() == [list(vote) for vote in own.votes]
            assert recorded.candidates == len(own.tokens) + 1 and recorded.counts == len(own.votes)
            assert recorded.came == (own.tokens.index(token) if token in own.tokens else len(own.tokens))
            came_none += token not in own.tokens
        text = whole
    assert came_none, "no token came without a vote"


def test_oracle_drafts_the_text_as_far_as_it_has_votes() -> None:
    """An oracle that drafts tokens without votes is no bound of what weights reach."""
    text = [1, 2, 3, 4, 1, 2, 3]
    whole = [*text, 4, 1, 2, 9, 1]  # nobody votes for 9
    oracle = OraclePool.of(pool_of(text, guess_set_size=8), whole)
    step = ShareInput(0, 8, [0], WindowDrafts(), None)
    draft = oracle.propose_share(text, step).draft
    assert list(draft.tokens[:3]) == [4, 1, 2] and list(draft.parents[:3]) == [-1, 0, 1]
    assert 9 not in list(draft.tokens) and len(draft.tokens) <= 8
    assert list(oracle.propose_share(text, step._replace(budget=2)).draft.tokens) == [4, 1]
