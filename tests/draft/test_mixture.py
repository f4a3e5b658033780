"""The mixture: chances that add up, the tree grown by them, and weights that follow what turns out true."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from lp import compiled
from lp.compiled import U64
from lp.draft.pool import mixture
from lp.draft.pool.best_first_tree import MIN_PROB
from lp.draft.pool.mixture import (
    FEATURES,
    GAPS,
    GUESS_0,
    LEARNING_RATE,
    LEVELS,
    LOGITS_0,
    NONE_0,
    TEXT_0,
    TOGETHER_0,
    WINDOW_0,
)
from lp.draft.pool.tables import ORDERS, M
from lp.draft.window import WindowDrafts
from lp.sampling.noise import _keyed, _signed, _uniform, gumbel, sequence_key
from tests.support.layouts import tree_paths
from tests.support.pools import (
    TEXT_ONLY,
    Ballot,
    ballot,
    drawn_pool,
    drawn_step,
    empty_tables,
    logits_of,
    pool_of,
    reads_of,
)


def test_noise_is_the_samplers() -> None:
    """Guesses under any other noise are guesses at another text."""
    for seed, sequence, position in [(0, 0, 0), (7, 3, 1000), (2**63 - 2, 1, 2**31)]:
        key = U64(_keyed(sequence_key(seed, sequence), position))
        ours = [mixture.gumbel(key, token) for token in range(5000)]
        theirs = gumbel(seed, sequence, position, 5000, torch.device("cpu"))
        assert np.abs(np.array(ours) - theirs.numpy()).max() < 1e-8


def test_noise_is_finite_whatever_the_bits() -> None:
    """Half above the largest 53 bits rounds up to 1, whose noise is infinite: a NaN in the logits, to its reader."""
    ones = (1 << 64) - 1
    for bits in [0, 1 << 11, ones >> 1, (1 << 63) + (1 << 11), ones - (1 << 11), ones - 1, ones]:
        theirs = float(_uniform(torch.tensor([_signed(bits)])))
        assert 0 < theirs < 1 and theirs == mixture.uniform(U64(bits))
        if bits >> 11 < ones >> 11:  # all others are as they were
            assert theirs == ((bits >> 11) + 0.5) * 2.0**-53


def test_logarithm_and_exponential() -> None:
    """They stand in for math's, whose last bits differ among machines."""
    rng = random.Random(0)
    for value in [2.0**-54, 0.5, math.sqrt(0.5), 1.0, 1 - 2.0**-53, 40.0] + [rng.random() for _ in range(3000)]:
        assert compiled.log(value) == pytest.approx(math.log(value), rel=1e-9, abs=1e-10)
    for value in [0.0, -1e-300, -1e-12, -0.5, -699.9, -709.0, -800.0] + [rng.uniform(-60, 0) for _ in range(3000)]:
        assert compiled.exp(value) == pytest.approx(math.exp(value), rel=1e-9, abs=1e-300)


def test_chances_add_up_to_one() -> None:
    """A chance that is none would spend rows on the wrong branch; each is the softmax of its votes' weights."""
    sources = set()
    for seed in range(100):
        pool, text = drawn_pool(random.Random(seed))
        seen = ballot(pool, text)
        sources |= seen.sources()
        assert math.fsum(seen.accept_probs) == pytest.approx(1, abs=1e-12) and min(seen.accept_probs) > 0
        assert len(set(seen.tokens)) == len(seen.tokens) == len(seen.accept_probs) - 1
        for token, chance in zip(seen.tokens, seen.accept_probs, strict=False):
            assert chance == pytest.approx(math.exp(seen.log_chance(pool._tables.weights, token)), rel=1e-7)
    assert sources == {"text", "window", "guess", "logits"}


def test_kinds_that_agree_vote_together() -> None:
    """A vote filed under other kinds, or another rank, learns about tokens that it is not for."""
    levels = set()
    for seed in range(100):
        pool, text = drawn_pool(random.Random(seed))
        seen = ballot(pool, text if seed % 2 else text[:12])  # of which the pool has read what follows
        for index in range(len(seen.tokens)):
            features = {feature for token, feature in seen.votes if token == index}
            each = (WINDOW_0 - TEXT_0) // len(ORDERS)
            orders = [ORDERS[feature // each] for feature in features if feature < WINDOW_0]
            guesses = [(feature - GUESS_0) // M for feature in features if GUESS_0 <= feature < LOGITS_0]
            ranks = [(feature - LOGITS_0) // GAPS % 4 for feature in features if LOGITS_0 <= feature < NONE_0]
            expected = (
                0,  # there are no corpora
                sum(max(orders, default=0) > longest for longest in (0, 1, 3)),
                0 if not guesses else 1 if max(guesses) == 0 else 2,
                4 - ranks[0] if ranks else 0,
                0,  # there are no model n-grams
            )
            (together,) = (feature - TOGETHER_0 for feature in features if feature >= TOGETHER_0)
            assert np.unravel_index(together, LEVELS) == expected
            levels.add(expected)
    assert [len({level[kind] for level in levels}) for kind in range(1, 4)] == [4, 3, 5]


def test_tree_is_the_likeliest_within_its_budget() -> None:
    """Rows are what a step costs: every one goes to the likeliest token left, and what the window has is free."""
    free_nodes = full = 0
    for seed in range(200):
        rng = random.Random(seed)
        depth = rng.choice([1, 2, 5, 12])
        pool, text = drawn_pool(rng, draft_depth=depth, guess_set_size=10)
        budget = rng.choice([0, 1, 7, 40])
        known = pool.propose(text, 40)
        along = rng.choice([[], *tree_paths(known)])  # a window that guesses what the pool does
        row, column = [text[-1], *along, 3, 4], [text[-1], *along[:1], 5]
        if rng.random() < 0.3:
            row, column = [], []
        tree = pool.propose(text, budget, WindowDrafts(row, column))
        paths = tree_paths(tree)
        chains = {tuple(chain[1:end]) for chain in (row, column) for end in range(2, len(chain) + 1)}
        paid = sum(path not in chains for path in paths)
        assert len(set(paths)) == len(paths) and paid <= budget
        assert max(map(len, paths), default=0) <= depth
        assert tree.accept_probs == sorted(tree.accept_probs, reverse=True)
        assert all(chance >= MIN_PROB for chance in tree.accept_probs)
        for chance, parent in zip(tree.accept_probs, tree.parents, strict=True):
            assert chance <= (tree.accept_probs[parent] if parent >= 0 else 1)
        if not row and budget:
            # Nothing likelier was left out: what is proposed at twice the budget begins the same.
            more = pool.propose(text, 2 * budget)
            assert (more.tokens[: len(tree)], more.parents[: len(tree)]) == (tree.tokens, tree.parents)
        if at := tree.tokens and ballot(pool, text):
            assert tree.tokens[0] == at.tokens[int(np.argmax(at.accept_probs[:-1]))]
        free_nodes, full = free_nodes + len(paths) - paid, full + (paid == budget > 0)
    assert free_nodes > 50 and full > 50


def test_node_chance_is_the_product_along_its_path() -> None:
    """The chance that a row is accepted is that all before it are too."""
    for seed in range(30):
        pool, text = drawn_pool(random.Random(seed))
        tree = pool.propose(text, 30)
        for path, chance in zip(tree_paths(tree), tree.accept_probs, strict=True):
            product = 1.0
            for depth, token in enumerate(path):
                at = ballot(pool, [*text, *path[:depth]])
                product *= at.accept_probs[at.tokens.index(token)]
            assert chance == pytest.approx(product, rel=1e-9)


@pytest.mark.parametrize("right", ["window", "guess"])
def test_what_is_always_right_is_believed(right: str) -> None:
    """Weights must follow this very model and text, whatever they began with."""
    pool = pool_of([500, 501], num_logits=0, output_ngrams=False, prompt_ngrams=False)
    text, before = [500, 501], None
    for step in range(300):
        c, following, truth, wrong = text[-1], 1000 + 3 * step, 1001 + 3 * step, 1002 + 3 * step
        window, guess = (truth, wrong) if right == "window" else (wrong, truth)
        text.append(following)
        nodes = [(c, -1, following), (following, 0, guess)]
        pool.observe(text, 1, reads_of(len(text) - 2, nodes, logits_of([[], []]), [(c, following, window)]))
        seen = ballot(pool, text)
        by_token = dict(zip(seen.tokens, seen.accept_probs, strict=False))
        assert set(by_token) == {truth, wrong}
        before = before or by_token
        text.append(truth)
        pool.observe(text, 1, reads_of(len(text) - 2, [], logits_of([])))
    assert before is not None and before[truth - 897] == pytest.approx(1 / 3) == before[wrong - 897]
    assert by_token[truth] > 0.9 and by_token[wrong] < 0.05


def test_learn_false_leaves_the_weights() -> None:
    """The ablation of learning."""
    rng, text = random.Random(0), [1, 2, 3]
    for learn in (False, True):
        pool = pool_of(text, learn=learn)
        before = [np.array(pool._tables.weights), np.array(pool._tables.squares)]
        said = list(text)
        for _ in range(20):
            new, seen = drawn_step(rng, said, 30, 16)
            said += new
            pool.observe(said, len(new), seen)
        after = [np.asarray(pool._tables.weights), np.asarray(pool._tables.squares)]
        for old, now in zip(before, after, strict=True):
            assert (old != now).any() == learn


def _numerical_gradient(seen: Ballot, weights: np.ndarray, truth: int) -> np.ndarray:
    gradient, h = np.zeros(FEATURES), 1e-5
    for feature in {feature for _, feature in seen.votes}:
        up, down = weights.copy(), weights.copy()
        up[feature], down[feature] = up[feature] + h, down[feature] - h
        gradient[feature] = (seen.log_chance(up, truth) - seen.log_chance(down, truth)) / (2 * h)
    return gradient


def test_learning_follows_the_gradient() -> None:
    """A gradient that is off by a sign or a share still learns something, and never says so."""
    shared = 0
    for seed in range(30):
        rng = random.Random(seed)
        pool, text = drawn_pool(rng)
        tables, squares = pool._tables, 1e12  # so large that the step is the gradient times a constant
        for truth in [*ballot(pool, text).tokens[:4], 999]:
            seen, weights = ballot(pool, text), np.array(tables.weights)
            np.asarray(tables.squares)[:] = squares
            mixture.learn(tables, pool._predictor, len(seen.tokens), len(seen.votes), truth)
            moved = (np.asarray(tables.weights) - weights) * math.sqrt(squares) / LEARNING_RATE
            np.testing.assert_allclose(moved, _numerical_gradient(seen, weights, truth), atol=2e-6)
            shared += len({feature for _, feature in seen.votes}) < len(seen.votes)
            np.asarray(tables.weights)[:] = weights
    assert shared, "no feature had two votes"


@pytest.mark.parametrize(("noise", "renoise"), [((5, 2), True), ((5, 2), False), (None, True)])
def test_stored_logits_guess_under_the_noise_of_their_position(noise: tuple[int, int] | None, renoise: bool) -> None:
    """Under sampling the token is argmax(logits + noise of its position): another's noise guesses another token."""
    rng, differ = random.Random(1), 0
    weights = np.zeros(FEATURES)
    for group in range(8):
        weights[LOGITS_0 + group * 4 * GAPS : LOGITS_0 + (group * 4 + 1) * GAPS] = 5.0  # what is best of its row
    config: dict[str, Any] = TEXT_ONLY | {"num_logits": 16, "renoise": renoise, "output_ngrams": False, "learn": False}
    logits = [rng.gauss(0, 1.5) for _ in range(16)]
    text = [9, 7, 3]
    pool = pool_of(text, noise, empty_tables(pool_of([1], **config).config, weights), **config)
    rows = [list(enumerate(logits))]
    pool.observe([*text, 4], 1, reads_of(2, [(3, -1, 4)], logits_of([random.Random(0).sample(rows[0], 16)])))
    text.append(4)
    for _ in range(50):
        new = [rng.randrange(100, 200), 9, 7, 3]  # the context whose logits are known, at another position
        text += new
        pool.observe(text, len(new), reads_of(0, [], logits_of([])))
        scores = torch.tensor(logits).double()  # float32 first, as they are kept
        if noise and renoise:
            scores = scores + gumbel(*noise, len(text), 16, torch.device("cpu"))
        assert pool.propose(text, 1).tokens == [int(scores.argmax())]
        differ += int(scores.argmax()) != int(np.argmax(logits))
    assert (differ > 10) == bool(noise and renoise)
