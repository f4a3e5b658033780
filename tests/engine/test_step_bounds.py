"""What bounds a step: the token budget, G, the noise held for it, and what ranks' logits may differ by."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import lp
from lp.budget.step_times import StepTimes
from lp.config import KVDtype
from lp.draft.pool.factory import PoolFactory
from lp.draft.pool.ngram_pool import NGramPool
from lp.draft.source import DraftSource
from lp.draft.tree import DraftTree
from lp.engine.lookahead import LookaheadDecoder
from lp.models.support import logit_rounding
from lp.parallel import message
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import drawn_text, tiny_model

STEP_TIMES = StepTimes.constant(0.01, 124)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("shape", [(8, 4, 0), (8, 4, 1), (15, 5, 2)])
def test_g_bounds_draft_tokens_to_the_end(shape: tuple[int, int, int], adaptive: bool, ranks: int) -> None:
    """Near the end the window leaves its tokens free; drafts that took them would read prices past their array."""
    w, n, g = shape
    config = lp.LookaheadConfig(window_size=w, ngram_size=n, guess_set_size=g, adaptive=adaptive)
    model = tiny_model()
    ids = drawn_text(random.Random(1), 30)
    plain = lp.AutoregressiveDecoder(model).generate(ids, 20).tokens

    def body(context: ParallelContext) -> lp.GenerationOutput:
        step_times = STEP_TIMES if adaptive else None
        return lp.LookaheadDecoder(model, config, context, step_times=step_times).generate(ids, 20)

    for output in run_lockstep(ranks, body):
        assert output.tokens == plain
        assert max(step.num_draft for step in output.step_stats) <= ranks * g * (n - 1)


def test_noise_is_held_for_the_longest_path() -> None:
    """Two positions of a step that share a place in the ring would be sampled under the same noise: wrong tokens."""
    model = tiny_model(sharpness=6.0)
    ids = [1, 2, 3, 4] * 40
    config = lp.LookaheadConfig(window_size=3, ngram_size=5, guess_set_size=5, adaptive=True)
    sampling = lp.SamplingParams(temperature=0.3, seed=2)
    plain = lp.AutoregressiveDecoder(model).generate(ids, 60, sampling).tokens
    assert lp.LookaheadDecoder(model, config, step_times=STEP_TIMES).generate(ids, 60, sampling).tokens == plain


class WholeTrees(DraftSource):
    """The pool without shares of its own, so that every rank cuts the whole tree."""

    def __init__(self, pool: NGramPool) -> None:
        self.num_logits = pool.num_logits
        self._pool = pool

    def propose(self, *asked: Any) -> DraftTree:
        return self._pool.propose(*asked)

    def begin(self, *seen: Any) -> None:
        self._pool.begin(*seen)

    def observe(self, *seen: Any) -> None:
        self._pool.observe(*seen)


def test_a_source_of_whole_trees_may_use_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The price is a rank's own: whole trees that follow it would differ from rank to rank."""
    new_source = PoolFactory.new_source
    monkeypatch.setattr(PoolFactory, "new_source", lambda self, call: WholeTrees(new_source(self, call)))
    model = tiny_model()
    ids = drawn_text(random.Random(3), 40)
    plain = lp.AutoregressiveDecoder(model).generate(ids, 48).tokens
    step_times = StepTimes((1, 120), (0.01, 0.02), 0.01)

    def body(context: ParallelContext) -> list[int]:
        return lp.LookaheadDecoder(model, None, context, step_times=step_times).generate(ids, 48).tokens

    assert run_lockstep(3, body) == [plain] * 3


@pytest.mark.parametrize(("columns", "drafts", "budget"), [(0, 50, 9), (8, 16, 16), (8, 9, 16)])
def test_a_tree_larger_than_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, columns: int, drafts: int, budget: int
) -> None:
    """A message has no room for it, be it the window's nodes beside it that are too many."""
    tree = DraftTree([1] * drafts, [-1] * drafts, merge=False)
    monkeypatch.setattr(LookaheadDecoder, "source", lambda self, request: _Fixed(tree))
    config = lp.LookaheadConfig(window_size=columns, ngram_size=2, guess_set_size=8)
    with pytest.raises(lp.UserError, match=rf"_Fixed proposed {drafts} draft tokens.* the budget is {budget}"):
        lp.LookaheadDecoder(tiny_model(), config).generate([1, 2, 3], 8)


class _Fixed(DraftSource):
    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree

    def propose(self, *_: object) -> DraftTree:
        return self.tree


def test_probabilities_beyond_one_stay_within_their_bits() -> None:
    """A source of the user's may state them; a negative code would change a node's parent."""
    assert [message.prob_code(prob) for prob in (1.05, 2.0, 1.0, 0.0, 1e-30)] == [1, 1, 1, 0, 255]


def test_rounding_follows_the_models_precision() -> None:
    """Too strict, and a job of right models stops; too lax, and a wrong weight is not told."""
    assert logit_rounding(tiny_model(dtype=torch.float32)) == 2**-11.5
    assert logit_rounding(tiny_model()) == 2**-11.5  # float64, but for norms and softmax
    assert logit_rounding(tiny_model("mixtral", dtype=torch.float32)) == 2**-3.5
    mixed = tiny_model(dtype=torch.bfloat16)
    mixed.get_input_embeddings().float()
    assert logit_rounding(mixed) == 2**-3.5
    rounded = [logit_rounding(tiny_model(), KVDtype(kv_dtype)) for kv_dtype in ("int8", "fp8")]
    assert rounded == [2**-3.5, 2**-1.5]  # a key between two numbers may be stored as either


@pytest.mark.parametrize(("precision", "rounding"), [("high", 2**-5), ("medium", 2**-3.5)])
def test_rounding_knows_of_coarser_products(precision: str, rounding: float) -> None:
    """TF32 and bfloat16 products depend on a pass's number of tokens."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert logit_rounding(tiny_model(dtype=torch.float32)) == rounding
    finally:
        torch.set_float32_matmul_precision(before)
