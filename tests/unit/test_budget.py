"""The adaptive budget: trees are cut where rows stop paying, choices are near the best there is, plain is the floor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

import lp
from launch.bench.prompts import load_builtin
from lp.budget.policy import AdaptiveBudget
from lp.budget.step_times import StepTimes, flat
from lp.compiled import given
from lp.draft.source import DraftSource, StepSamples, TokenPrice
from lp.draft.tree import DraftTree
from lp.engine.request import Request
from lp.models.loader import DEMO_MODEL, load
from lp.parallel.context import ParallelContext
from lp.parallel.lockstep import run_lockstep
from tests.pools import drawn_curve, drawn_step, pool_of
from tests.tiny_models import drawn_text, tiny_model

NOTHING = DraftTree(0)
MOST = 100  # rows of a trace's proposals
CURVES = {
    "flat": flat(0.01, 128),
    "linear": StepTimes((1, 128), (0.01, 0.01 + 127 * 0.002), 0.01),
    "a step at 32": StepTimes((1, 31, 32, 128), (0.01, 0.011, 0.022, 0.024), 0.01),
    "a bump below 32": StepTimes((1, 2, 31, 32, 128), (0.02, 0.04, 0.05, 0.012, 0.03), 0.02),
}


def _cut(accept_probs: Sequence[float], price: TokenPrice) -> int:
    """Rows of the best cut, by trying all of them."""
    sizes = range(len(accept_probs) + 1)
    costs = [
        price.tokens_per_s * price.seconds[price.base_tokens + rows]
        - price.exploration_bonus * min(rows, price.exploration_tokens)
        for rows in sizes
    ]
    gains = [0.0, *accumulate(accept_probs)]
    return int(np.argmax([gain - cost for gain, cost in zip(gains, costs, strict=True)]))


def test_a_tree_is_cut_where_it_is_worth_most() -> None:
    """Growth that stops at the first dear row misses the cheap ones behind it."""
    sizes = set()
    for seed in range(120):
        rng = random.Random(seed)
        text = [rng.randrange(30) for _ in range(40)]
        pool = pool_of(text, guess_set_size=60)
        for _ in range(3):
            new, seen = drawn_step(rng, text, 30, 16)
            text += new
            pool.observe(list(text), len(new), seen)
        curve = drawn_curve(rng)
        rate, base = rng.choice([0.0, 0.3, 1, 3]) / curve.plain_s, rng.choice([1, 2, 8])
        lesson = rng.choice([0.0, 0.05])
        price = TokenPrice(rate, base, given(curve.table), given(curve.slopes), lesson, 8)
        accept_probs = pool.propose(text, 60).accept_probs
        tree = pool.propose(text, 60, (), (), price)
        assert tree.accept_probs == accept_probs[: len(tree)]
        taken, best = (
            sum(accept_probs[:rows]) + lesson * min(rows, 8) - rate * curve.table[base + rows]
            for rows in (len(tree), _cut(accept_probs, price))
        )
        assert taken == pytest.approx(best, abs=1e-9), f"seed {seed}: {len(tree)} rows"
        sizes.add(len(tree))
    assert {0, 60} < sizes and len(sizes) > 12


def test_chances_are_believed_as_far_as_they_came_true() -> None:
    """Of a path of d tokens: truth ** d, and what held for n tokens holds for d more with n / (n + d)."""
    rng = random.Random(1)
    text = [rng.randrange(30) for _ in range(40)] * 2
    pool, shared = pool_of(text, guess_set_size=60), 0
    free = given(np.zeros(61))
    plain, doubted = (
        pool.propose(text, 60, (), (), TokenPrice(0.0, 0, free, free, calibration=truth, depth_discount=risk))
        for truth, risk in ((1.0, 0.0), (0.9, 1 / 8))
    )
    known = _by_path(plain)
    for path, chance in _by_path(doubted).items():
        if path in known:
            shared += 1
            assert chance == pytest.approx(known[path] * 0.9 ** len(path) / (1 + len(path) / 8)), path
    assert shared > 20


def _by_path(tree: DraftTree) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, tree.accept_probs, strict=True))


@dataclass
class Position:
    """What the pool proposed behind one token of a text, what was true of it, and what came."""

    tree: DraftTree
    true: list[int]  # the nodes that were, ascending
    text: list[int]

    def believed(self, price: TokenPrice) -> DraftTree:
        """The tree with chances as far as they are believed."""
        tree, depths = DraftTree(MOST), dict[int, int]()
        tree.tokens, tree.parents = self.tree.tokens, self.tree.parents
        for node, parent in enumerate(tree.parents):
            depths[node] = depths.get(parent, 0) + 1
        belief = [price.calibration**depth / (1 + price.depth_discount * depth) for depth in range(MOST + 1)]
        tree.accept_probs = [chance * belief[depths[node]] for node, chance in enumerate(self.tree.accept_probs)]
        return tree


class _Tracer:
    """A source that notes what the pool proposes at every token, and proposes nothing."""

    def __init__(self, source: DraftSource, trace: list[Position]) -> None:
        self.source, self.trace, self.num_logits = source, trace, source.num_logits
        self.trees: list[tuple[int, DraftTree]] = []

    def propose(self, text: list[int], budget: int, *window: Any) -> DraftTree:
        self.trees.append((len(text), self.source.propose(text, MOST, (), ())))
        return DraftTree(0)

    def begin(self, prompt: Sequence[int], top_logits: np.ndarray) -> None:
        self.source.begin(prompt, top_logits)

    def observe(self, text: list[int], moved: int, seen: StepSamples) -> None:
        self.source.observe(text, moved, seen)

    def finish(self, text: list[int]) -> None:
        """Which nodes the text made true."""
        for length, tree in self.trees:
            depths, true = {-1: 0}, []
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
                at = length + depths.get(parent, len(text))
                if at < len(text) and text[at] == token:
                    depths[node] = depths[parent] + 1
                    true.append(node)
            self.trace.append(Position(tree, true, text[length:]))


class _Tracing(lp.LookaheadDecoder):
    def source(self, request: Request) -> DraftSource:
        self.tracer = _Tracer(super().source(request), [])
        return self.tracer


@pytest.fixture(scope="module")
def traces() -> list[list[Position]]:
    """Of built-in prompts, greedy and sampled: what was proposed at every token."""
    if not (DEMO_MODEL / "model.safetensors").exists():
        pytest.skip("the demo model's weights are not here")
    loaded = load("demo")
    config = lp.LookaheadConfig(window_size=0, guess_set_size=MOST)
    found = []
    for prompt, sampling in zip(load_builtin(4), [None, lp.SamplingParams(temperature=0.8, seed=0)] * 2, strict=True):
        decoder = _Tracing(loaded.model, config)
        ids = loaded.tokenizer(prompt.text)["input_ids"]
        decoder.tracer_text = [*ids, *decoder.generate(ids, 120, sampling).tokens]
        decoder.tracer.finish(decoder.tracer_text)
        found.append(decoder.tracer.trace)
    return found


def _fixed_s(trace: list[Position], rows: int, curve: StepTimes) -> float:
    """Seconds of a text whose every step takes so many rows."""
    at, seconds = 0, 0.0
    while at < len(trace):
        at += 1 + sum(node < rows for node in trace[at].true)
        seconds += curve.step_s(1 + rows)
    return seconds


def _first(tree: DraftTree, rows: int) -> DraftTree:
    cut = DraftTree(rows)
    cut.tokens, cut.parents, cut.accept_probs = tree.tokens[:rows], tree.parents[:rows], tree.accept_probs[:rows]
    return cut


def _adaptive_s(trace: list[Position], curve: StepTimes) -> float:
    """The same of one whose steps take what the budget says."""
    budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True, window_size=0, guess_set_size=MOST), curve)
    at, seconds = 0, 0.0
    while at < len(trace):
        tree = trace[at].believed(budget.price)
        rows = 0 if budget.idle else _cut(tree.accept_probs, budget.price)
        tokens = 1 + sum(node < rows for node in trace[at].true)
        seconds += curve.plain_s if budget.idle else curve.step_s(1 + rows)
        budget.observe(trace[at].text[:tokens], 0 if budget.idle else 1 + rows, _first(tree, rows))
        at += tokens
    return seconds


@pytest.mark.parametrize("name", CURVES)
def test_choices_come_near_the_best(name: str, traces: list[list[Position]]) -> None:
    """Within 5 % of the time that the best number of rows for each text takes, found by trying all."""
    best = [min(_fixed_s(trace, rows, CURVES[name]) for rows in range(MOST + 1)) for trace in traces]
    taken = [_adaptive_s(trace, CURVES[name]) for trace in traces]
    assert sum(taken) <= sum(best) / 0.95, f"{name}: {[b / t for b, t in zip(best, taken, strict=True)]} of the best"


def _taken(output: lp.GenerationOutput) -> list[tuple[int, int, int, bool]]:
    return [(step.columns, step.num_draft, step.accepted, step.idle) for step in output.step_stats]


@pytest.mark.parametrize(("ranks", "least"), [(2, 2000), (5, 200)])
def test_ranks_choose_alike(ranks: int, least: int) -> None:
    """A budget that looks at a rank's own clock, or forgets in another order, parts from the others' some day."""
    model, seen, steps = tiny_model(), set(), 0
    for seed in range(100):
        rng = random.Random(seed)
        curve, ids = drawn_curve(rng), drawn_text(rng, 40)
        config = lp.LookaheadConfig(adaptive=True, window_size=8, guess_set_size=24)
        sampling = rng.choice([None, lp.SamplingParams(temperature=2.0, seed=seed)])

        def body(context: ParallelContext, asked: Any = (config, curve, ids, sampling)) -> lp.GenerationOutput:
            config, curve, ids, sampling = asked
            decoder = lp.LookaheadDecoder(model, config, context, curve=curve)
            return decoder.generate(ids, 150, sampling, eos_token_id=())

        outputs = run_lockstep(ranks, body)
        assert all(_taken(output) == _taken(outputs[0]) for output in outputs), f"seed {seed}"
        assert outputs[0].tokens == lp.AutoregressiveDecoder(model).generate(ids, 150, sampling, eos_token_id=()).tokens
        seen |= {(columns > 0, candidates > 0, idle) for columns, candidates, _, idle in _taken(outputs[0])}
        steps += outputs[0].steps
        if steps >= least:
            break
    assert steps >= least and len(seen) >= 3


def test_paths_that_break_are_cut_short() -> None:
    """A loop whose turns differ: every path looks sure to its end, and breaks at its fifth token."""
    budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), StepTimes((1, 100), (0.01, 0.04), 0.01))
    taken = []
    for _ in range(12):
        price, tree = budget.price, DraftTree(96)
        tree.add_path([1] * 96)
        tree.accept_probs = [
            (0.99 * price.calibration) ** depth / (1 + price.depth_discount * depth) for depth in range(1, 97)
        ]
        cut = _first(tree, _cut(tree.accept_probs, price))
        taken.append(len(cut))
        budget.observe([1] * 4 + [2], 1 + len(cut), cut)
    assert taken[0] > 40 and all(4 <= rows <= 12 for rows in taken[-3:]), taken
    for _ in range(12):
        budget.observe([1] * 30, 31, _first(tree, 29))
    assert budget.price.calibration > 0.95, "what holds again is believed again"


def test_a_rank_pads_its_share() -> None:
    """The curve's rows are of all ranks together: padded up to all of them, each would run what one rank did."""
    config = lp.LookaheadConfig(adaptive=True)
    one, two = (AdaptiveBudget(config, CURVES["a bump below 32"], ranks) for ranks in (1, 2))
    assert (one.padded(20), two.padded(11), two.padded(40)) == (32, 17, 40)


def test_columns_follow_what_rows_cost() -> None:
    """Columns bring a few per cent: right where rows are free, wrong where they are dear."""
    chosen = {}
    for name, curve in CURVES.items():
        budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), curve)
        for _ in range(30):
            budget.observe([1] * 3, 20, NOTHING)
        chosen[name] = budget.columns
    assert chosen["flat"] == 16 and chosen["linear"] == 0 and chosen["a bump below 32"] > 0


def test_idle_steps_are_plain_ones_and_the_pool_catches_up() -> None:
    """A pool that misses the tokens of idle steps proposes what follows another text."""
    curve = StepTimes((1, 200), (1.5, 300.0), 1.0)  # nothing pays
    model, ids = tiny_model(), drawn_text(random.Random(3), 30)
    config = lp.LookaheadConfig(adaptive=True)
    decoder = lp.LookaheadDecoder(model, config, curve=curve)
    sampling = lp.SamplingParams(temperature=3.0, seed=1)
    output = decoder.generate(ids, 170, sampling, eos_token_id=())
    idle = [step.idle for step in output.step_stats]
    assert output.tokens == lp.AutoregressiveDecoder(model).generate(ids, 170, sampling, eos_token_id=()).tokens
    assert sum(idle) > 100 and not all(idle[-70:])
    assert "steps left plain" in decoder.explain() and f"{sum(idle)} steps left plain" in decoder.explain()


def test_the_pool_follows_idle_steps() -> None:
    """A pool that misses the tokens of idle steps proposes what follows another text."""
    rng = random.Random(5)
    text = [rng.randrange(30) for _ in range(40)]
    pool, told = pool_of(text, guess_set_size=20, learn=False), pool_of(text, guess_set_size=20, learn=False)
    nothing = StepSamples([], [], [], [], [], np.zeros((0, 16), np.int64), [])
    for token in (text * 2)[:30]:
        text.append(token)
        told.observe(list(text), 1, nothing)
    assert pool.propose(text, 20).tokens == told.propose(text, 20).tokens != []
    text += text[3:5]
    for each in (pool, told):
        each.observe(list(text), 2, nothing)
    assert pool.propose(text, 20).tokens == told.propose(text, 20).tokens
