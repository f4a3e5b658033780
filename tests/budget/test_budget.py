"""The adaptive budget: trees are cut where draft tokens stop paying, near the best there is, alike on every rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

import lp
from launch.data.prompts import load_builtin
from lp.budget.calibration import DraftRecord
from lp.budget.policy import AdaptiveBudget, Company, FixedBudget
from lp.budget.step_times import StepTimes
from lp.compiled import compiled_array
from lp.draft.source import DraftSource, StepSamples, TokenPrice
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.engine.request import Request
from lp.models.loader import DEMO_MODEL, load
from lp.models.runner import ModelRunner, PassLogits
from lp.models.tree_pass import TreePass
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from lp.sampling.top_logits import TopLogits
from tests.conftest import LONG
from tests.support.layouts import path_tree, record_of, tree_paths
from tests.support.pools import drawn_step, drawn_step_times, pool_of
from tests.support.tiny_models import drawn_text, tiny_model

NOTHING = DraftRecord()
MAX_DRAFT = 100  # draft tokens of a trace's trees
STEP_TIMES = {
    "constant": StepTimes.constant(0.01, 128),
    "linear": StepTimes((1, 128), (0.01, 0.01 + 127 * 0.002), 0.01),
    "a step at 32": StepTimes((1, 31, 32, 128), (0.01, 0.011, 0.022, 0.024), 0.01),
    "a bump below 32": StepTimes((1, 2, 31, 32, 128), (0.02, 0.04, 0.05, 0.012, 0.03), 0.02),
}


def _cut(accept_probs: Sequence[float], price: TokenPrice) -> int:
    """Draft tokens of the best cut, by trying all of them."""
    sizes = range(len(accept_probs) + 1)
    costs = [
        price.tokens_per_s * price.seconds[price.base_tokens + size]
        - price.exploration_bonus * min(size, price.exploration_tokens)
        for size in sizes
    ]
    gains = [0.0, *accumulate(accept_probs)]
    return int(np.argmax([gain - cost for gain, cost in zip(gains, costs, strict=True)]))


def test_a_tree_is_cut_where_it_is_worth_most() -> None:
    """Growth that stops at the first expensive token misses the cheap ones behind it."""
    sizes = set()
    for seed in range(120):
        rng = random.Random(seed)
        text = [rng.randrange(30) for _ in range(40)]
        pool = pool_of(text, guess_set_size=60)
        for _ in range(3):
            new, samples = drawn_step(rng, text, 30, 16)
            text += new
            pool.observe(list(text), len(new), samples)
        times = drawn_step_times(rng)
        rate = rng.choice([0.0, 0.3, 1, 3]) / times.plain_s
        base = rng.choice([1, 2, 8])
        bonus = rng.choice([0.0, 0.05])
        seconds = compiled_array(times.seconds_by_tokens)
        price = TokenPrice(rate, base, seconds, compiled_array(times.marginal_seconds), bonus, 8)
        accept_probs = pool.propose(text, 60).accept_probs
        tree = pool.propose(text, 60, price=price)
        assert tree.accept_probs == accept_probs[: len(tree)]
        worth, best = (
            sum(accept_probs[:size]) + bonus * min(size, 8) - rate * times.seconds_by_tokens[base + size]
            for size in (len(tree), _cut(accept_probs, price))
        )
        assert worth == pytest.approx(best, abs=1e-9), f"seed {seed}: {len(tree)} draft tokens"
        sizes.add(len(tree))
    assert {0, 60} < sizes and len(sizes) > 12


def test_a_tree_is_calibrated_and_discounted_by_depth() -> None:
    """A path of d tokens: calibration ** d, and what held for n tokens holds for d more with n / (n + d)."""
    rng = random.Random(1)
    text = [rng.randrange(30) for _ in range(40)] * 2
    pool, shared = pool_of(text, guess_set_size=60), 0
    free = compiled_array(np.zeros(61))
    plain, corrected = (
        pool.propose(text, 60, price=TokenPrice(0.0, 0, free, free, calibration=calibration, depth_discount=discount))
        for calibration, discount in ((1.0, 0.0), (0.9, 1 / 8))
    )
    known = _by_path(plain)
    for path, prob in _by_path(corrected).items():
        if path in known:
            shared += 1
            assert prob == pytest.approx(known[path] * 0.9 ** len(path) / (1 + len(path) / 8)), path
    assert shared > 20


def _by_path(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return dict(zip(tree_paths(tree), tree.accept_probs, strict=True))


@dataclass
class Position:
    """What the pool proposed behind one token of a text, which of it the text has, and the text from there on."""

    tree: DraftTree
    accepted: list[int]  # the nodes that the text has, ascending
    text: list[int]

    def corrected(self, price: TokenPrice) -> DraftTree:
        """The tree with calibrated and discounted probabilities."""
        depths = dict[int, int]()
        for node, parent in enumerate(self.tree.parents):
            depths[node] = depths.get(parent, 0) + 1
        factors = [price.calibration**depth / (1 + price.depth_discount * depth) for depth in range(MAX_DRAFT + 1)]
        probs = [prob * factors[depths[node]] for node, prob in enumerate(self.tree.accept_probs)]
        return replace(self.tree, accept_probs=probs)


class _Tracer(DraftSource):
    """A source that notes what the pool proposes at every token, and proposes nothing."""

    def __init__(self, source: DraftSource, trace: list[Position]) -> None:
        self.source, self.trace, self.num_logits = source, trace, source.num_logits
        self.trees: list[tuple[int, DraftTree]] = []

    def propose(self, text: list[int], budget: int, *window: Any) -> DraftTree:
        self.trees.append((len(text), self.source.propose(text, MAX_DRAFT, WindowDrafts(), None)))
        return DraftTree()

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        self.source.begin(prompt, top_logits)

    def observe(self, text: list[int], moved: int, samples: StepSamples) -> None:
        self.source.observe(text, moved, samples)

    def finish(self, text: list[int]) -> None:
        """Find the nodes that the text has."""
        for length, tree in self.trees:
            depths = {-1: 0}
            accepted = []
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
                at = length + depths.get(parent, len(text))
                if at < len(text) and text[at] == token:
                    depths[node] = depths[parent] + 1
                    accepted.append(node)
            self.trace.append(Position(tree, accepted, text[length:]))


class _Tracing(lp.LookaheadDecoder):
    def source(self, request: Request) -> DraftSource:
        self.tracer = _Tracer(super().source(request), [])
        return self.tracer


@pytest.fixture(scope="module")
def traces() -> list[list[Position]]:
    """What the pool proposes at every token of built-in prompts' texts, greedy and sampled: cuts are tried on them."""
    if not (DEMO_MODEL / "model.safetensors").exists():
        pytest.skip("the demo model's weights are not here")
    loaded = load("demo")
    config = lp.LookaheadConfig(window_size=0, guess_set_size=MAX_DRAFT)
    found = []
    for prompt, sampling in zip(load_builtin(4), [None, lp.SamplingParams(temperature=0.8, seed=0)] * 2, strict=True):
        decoder = _Tracing(loaded.model, config)
        ids = loaded.tokenizer(prompt.text)["input_ids"]
        decoder.tracer_text = [*ids, *decoder.generate(ids, 120, sampling).tokens]
        decoder.tracer.finish(decoder.tracer_text)
        found.append(decoder.tracer.trace)
    return found


def _fixed_s(trace: list[Position], num_draft: int, times: StepTimes) -> float:
    """Seconds of a text whose every step has so many draft tokens."""
    at, seconds = 0, 0.0
    while at < len(trace):
        at += 1 + sum(node < num_draft for node in trace[at].accepted)
        seconds += times.step_s(1 + num_draft)
    return seconds


def _first(tree: DraftTree, size: int) -> DraftTree:
    return DraftTree(tree.tokens[:size], tree.parents[:size], tree.accept_probs[:size])


def _adaptive_s(trace: list[Position], times: StepTimes) -> float:
    """Seconds of a text whose steps have as many as the budget decides."""
    budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True, window_size=0, guess_set_size=MAX_DRAFT), times)
    at, seconds = 0, 0.0
    while at < len(trace):
        price = budget.price(1, 0)
        tree = trace[at].corrected(price)
        num_draft = 0 if budget.idle else _cut(tree.accept_probs, price)
        tokens = 1 + sum(node < num_draft for node in trace[at].accepted)
        seconds += times.plain_s if budget.idle else times.step_s(1 + num_draft)
        new_tokens = trace[at].text[:tokens]
        budget.record_step(new_tokens, 1 + num_draft, record_of(_first(tree, num_draft), new_tokens))
        at += tokens
    return seconds


@pytest.mark.xdist_group("traces")
@pytest.mark.parametrize("name", STEP_TIMES)
def test_choices_come_near_the_best(name: str, traces: list[list[Position]]) -> None:
    """Within 5 % of the time with the best fixed number of draft tokens for each text, found by trying all."""
    best = [min(_fixed_s(trace, size, STEP_TIMES[name]) for size in range(MAX_DRAFT + 1)) for trace in traces]
    adaptive = [_adaptive_s(trace, STEP_TIMES[name]) for trace in traces]
    ratios = [b / a for b, a in zip(best, adaptive, strict=True)]
    assert sum(adaptive) <= sum(best) / 0.95, f"{name}: {ratios} of the best"


def _decisions(output: lp.GenerationOutput) -> list[tuple[int, int, int, bool]]:
    return [(step.columns, step.num_draft, step.accepted, step.idle) for step in output.step_stats]


@pytest.mark.parametrize(("ranks", "least"), [(2, 2000), (5, 200)] if LONG else [(2, 250), (5, 40)])
def test_ranks_choose_alike(ranks: int, least: int) -> None:
    """A budget that depends on its own rank's clock, or adds in another order, differs from the others' some day."""
    model = tiny_model()
    kinds = set()
    steps = 0
    for seed in range(100):
        rng = random.Random(seed)
        times, ids = drawn_step_times(rng), drawn_text(rng, 40)
        config = lp.LookaheadConfig(adaptive=True, window_size=8, guess_set_size=24)
        sampling = rng.choice([None, lp.SamplingParams(temperature=2.0, seed=seed)])

        def body(context: ParallelContext, settings: Any = (config, times, ids, sampling)) -> lp.GenerationOutput:
            config, times, ids, sampling = settings
            decoder = lp.LookaheadDecoder(model, config, context, step_times=times)
            return decoder.generate(ids, 150, sampling, eos_token_id=())

        outputs = run_lockstep(ranks, body)
        assert all(_decisions(output) == _decisions(outputs[0]) for output in outputs), f"seed {seed}"
        assert outputs[0].tokens == lp.AutoregressiveDecoder(model).generate(ids, 150, sampling, eos_token_id=()).tokens
        kinds |= {(columns > 0, draft > 0, idle) for columns, draft, _, idle in _decisions(outputs[0])}
        steps += outputs[0].steps
        if steps >= least and len(kinds) >= 3:
            break
    assert steps >= least and len(kinds) >= 3


def test_paths_that_break_are_cut_short() -> None:
    """A loop whose turns differ: every path looks certain to its end, and breaks at its fifth token."""
    budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), StepTimes((1, 100), (0.01, 0.04), 0.01))
    sizes = []
    for _ in range(12):
        price = budget.price(1, 0)
        probs = [(0.99 * price.calibration) ** depth / (1 + price.depth_discount * depth) for depth in range(1, 97)]
        tree = path_tree(probs)
        cut = _first(tree, _cut(tree.accept_probs, price))
        sizes.append(len(cut))
        budget.record_step([1] * 4 + [2], 1 + len(cut), record_of(cut, [1] * 4 + [2]))
    assert sizes[0] > 40 and all(4 <= size <= 12 for size in sizes[-3:]), sizes
    short = budget.price(1, 0).depth_discount
    for _ in range(12):
        budget.record_step([1] * 30, 31, record_of(_first(tree, 29), [1] * 30))
    assert budget.price(1, 0).calibration > 0.95, "paths that hold again are trusted again"
    assert budget.price(1, 0).depth_discount < short / 2, "and to a greater depth"


def test_a_rank_pads_its_own_tokens() -> None:
    """Step times count the tokens of a rank: as many ranks as there are, a rank's step is as large as that of one."""
    config = lp.LookaheadConfig(adaptive=True)
    for ranks in (1, 2, 8):
        budget = AdaptiveBudget(config, STEP_TIMES["a bump below 32"], ranks)
        assert (budget.padded_size(20), budget.padded_size(32), budget.padded_size(40)) == (32, 32, 40)
        assert budget.step_tokens == 128, "what the step times know"
        flat = AdaptiveBudget(config, StepTimes.constant(0.01, 500), ranks)
        assert flat.step_tokens == 16 + 184, "the bounds are a rank's"
        assert FixedBudget(config, ranks).padded_size(20) == 20


def test_a_step_is_padded_to_a_size_that_takes_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a step of 2 to 31 tokens takes longer than one of 32."""
    decoder = lp.LookaheadDecoder(
        tiny_model(), lp.LookaheadConfig(adaptive=True), step_times=STEP_TIMES["a bump below 32"]
    )
    forward, sizes = decoder.runner.forward_trees, list[list[int]]()

    def counted(passes: Sequence[TreePass], capture: bool = False) -> PassLogits:
        sizes.append([len(tree.tokens) for tree in passes])
        return forward(passes, capture)

    monkeypatch.setattr(decoder.runner, "forward_trees", counted)
    output = decoder.generate(drawn_text(random.Random(1), 40) * 3, 60, eos_token_id=())
    drafted = [step.num_tokens for step in output.step_stats]
    assert any(1 < size < 32 for size in drafted) and all(own >= 32 for (own,) in sizes), (drafted, sizes)


def test_a_second_is_shared_by_the_ranks_tokens() -> None:
    """While one rank computes a token more all of them may: each is worth its time at a fraction of the probability."""
    times = STEP_TIMES["linear"]
    one, four = (AdaptiveBudget(lp.LookaheadConfig(adaptive=True), times, ranks) for ranks in (1, 4))
    alone, shared = one.price(1, 0), four.price(3, 9)
    assert shared.tokens_per_s == alone.tokens_per_s / 4
    assert (shared.base_tokens, shared.least_tokens, alone.base_tokens, alone.least_tokens) == (3, 9, 1, 0)
    for budget in (one, four):
        budget.record_step([1] * 9, 2, DraftRecord([0.9], 0.9, 1))
    assert four.tokens_per_s == one.tokens_per_s > 1 / times.plain_s, "S and time are those of the step"


def test_a_step_of_several_texts_is_shared_by_them() -> None:
    """A text that paid for the whole step, or for none of it, would draft too little or too much."""
    times = STEP_TIMES["linear"]
    budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), times, texts=2)
    budget.record_step([1] * 20, 2, NOTHING)
    alone = budget.tokens_per_s
    assert alone > 200, "its own steps' rate"
    budget.company = Company(texts=2, other_tokens=5, tokens_per_s=150.0)
    assert budget.tokens_per_s == pytest.approx(2 / 0.012), "plain decoding of two texts, which is faster than 150"
    budget.company = Company(texts=2, other_tokens=5, tokens_per_s=170.0)
    assert budget.tokens_per_s == 170.0
    assert budget.price(3, 9).base_tokens == 3 + 5
    plain_of_each = (times.plain_s + times.step_s(2) - times.step_s(1)) / 2
    own = plain_of_each + times.step_s(1) - times.plain_s + times.step_s(5 + 9) - times.step_s(5 + 1)
    assert budget._own_s(9) == pytest.approx(own), "others' tokens, and half of a plain step, are theirs"


def test_columns_follow_the_step_times() -> None:
    """Columns bring a few per cent: right where tokens are free, wrong where they are expensive."""
    chosen = {}
    for name, times in STEP_TIMES.items():
        budget = AdaptiveBudget(lp.LookaheadConfig(adaptive=True), times)
        for _ in range(30):
            budget.record_step([1] * 3, 20, NOTHING)
        chosen[name] = budget.columns
    assert chosen["constant"] == 16 and chosen["linear"] == 0 and chosen["a bump below 32"] > 0


def test_idle_steps_are_plain_and_lookahead_is_tried_again() -> None:
    """A decoder that guesses nothing must still give plain decoding's tokens, and must not give up for good."""
    step_times = StepTimes((1, 200), (1.5, 300.0), 1.0)  # nothing pays
    model, ids = tiny_model(), drawn_text(random.Random(3), 30)
    config = lp.LookaheadConfig(adaptive=True)
    decoder = lp.LookaheadDecoder(model, config, step_times=step_times)
    sampling = lp.SamplingParams(temperature=3.0, seed=1)
    output = decoder.generate(ids, 170, sampling, eos_token_id=())
    idle = [step.idle for step in output.step_stats]
    assert output.tokens == lp.AutoregressiveDecoder(model).generate(ids, 170, sampling, eos_token_id=()).tokens
    assert sum(idle) > 100 and not all(idle[-70:])
    assert decoder.explain().endswith(f", {sum(idle)} plain steps")


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_budget_that_learns_is_told_of_every_step(adaptive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens and its size; a fixed one is told of none."""
    told: list[tuple[list[int], int]] = []
    for kind in (AdaptiveBudget, FixedBudget):
        record = kind.record_step

        def recording(self: Any, tokens: Any, size: int, drafts: DraftRecord, record: Any = record) -> None:
            told.append(([*tokens], size))
            record(self, tokens, size, drafts)

        monkeypatch.setattr(kind, "record_step", recording)
    config = lp.LookaheadConfig(adaptive=True) if adaptive else lp.LookaheadConfig(window_size=4, ngram_size=3)
    decoder = lp.LookaheadDecoder(tiny_model(), config, step_times=STEP_TIMES["constant"] if adaptive else None)
    output = decoder.generate(drawn_text(random.Random(3), 30), 40, eos_token_id=())
    if not adaptive:
        assert told == []
        return
    assert [len(tokens) for tokens, _ in told] == [step.accepted + 1 for step in output.step_stats if not step.idle]
    assert [token for tokens, _ in told for token in tokens][:40] == output.tokens
    assert [size for _, size in told] == [step.num_tokens for step in output.step_stats if not step.idle]


def test_a_plain_step_alone_is_padded_as_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that pays for two tokens would make every plain step of a text that drafts nothing slower."""
    times = StepTimes((1, 2, 4, 200), (1.0, 9.0, 2.0, 900.0), 1.0)
    sizes: list[int] = []
    forward = ModelRunner.forward_trees

    def noting(self: ModelRunner, trees: Any, *args: Any, **options: Any) -> Any:
        sizes.append(sum(len(tree.tokens) for tree in trees))
        return forward(self, trees, *args, **options)

    monkeypatch.setattr(ModelRunner, "forward_trees", noting)
    decoder = lp.LookaheadDecoder(tiny_model(), lp.LookaheadConfig(adaptive=True), step_times=times)
    sizes.clear()
    output = decoder.generate([1, 2, 3], 60, lp.SamplingParams(temperature=3.0, seed=1), eos_token_id=())
    steps = zip(sizes[-output.steps :], output.step_stats, strict=True)  # behind the prompt
    plain = [size for size, step in steps if step.idle]
    assert len(plain) > 20 and set(plain) == {1} and times.padded_size(2) == 4


def test_the_pool_follows_idle_steps() -> None:
    """A pool that misses the tokens of idle steps proposes what follows another text."""
    rng = random.Random(5)
    text = [rng.randrange(30) for _ in range(40)]
    pool, informed = (pool_of(text, guess_set_size=20, learn=False) for _ in range(2))
    nothing = StepSamples.of([], [], [], [], TopLogits.empty())
    for token in (text * 2)[:30]:
        text.append(token)
        informed.observe(list(text), 1, nothing)
    assert pool.propose(text, 20).tokens == informed.propose(text, 20).tokens != []
    text += text[3:5]
    for each in (pool, informed):
        each.observe(list(text), 2, nothing)
    assert pool.propose(text, 20).tokens == informed.propose(text, 20).tokens
