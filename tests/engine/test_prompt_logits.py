"""What the n-gram pool learns from the prompt's logits: of which tokens, and that it is the same in chunks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import lp
from lp.budget import policy
from lp.budget.policy import AdaptiveBudget, FixedBudget
from lp.budget.step_times import StepTimes
from lp.draft.pool.ngram_pool import NGramPool
from lp.engine import prompt_reader
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import drawn_text

PROMPT = drawn_text(random.Random(2), 40)
FREE = StepTimes.constant(0.01, 128)  # as on a GPU
DEAR = StepTimes((1, 64), (0.01, 0.021), 0.01)  # 64 tokens take more than two plain steps
Told = list[tuple[list[int], np.ndarray]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What pools are told of prompts: the prompt's last tokens, and the top-k tokens at each of them but the last."""
    calls: Told = []
    begin = NGramPool.begin

    def spy(pool: NGramPool, prompt: Any, top_logits: Any) -> None:
        calls.append((list(prompt), np.array(top_logits.tokens)))
        begin(pool, prompt, top_logits)

    monkeypatch.setattr(NGramPool, "begin", spy)
    return calls


def test_they_are_read_where_tokens_are_nearly_free() -> None:
    """By the step times alone, which are the same on all ranks."""
    config = lp.LookaheadConfig(adaptive=True)
    assert AdaptiveBudget(config, FREE).prompt_logits == policy.PROMPT_LOGITS
    edge = StepTimes((1, 64), (0.01, 0.02), 0.01)
    assert AdaptiveBudget(config, edge).prompt_logits == policy.PROMPT_LOGITS
    assert AdaptiveBudget(config, DEAR).prompt_logits == 0
    small = lp.LookaheadConfig(adaptive=True, window_size=2, ngram_size=3, guess_set_size=4)  # a table of 12 tokens
    assert AdaptiveBudget(small, StepTimes.constant(0.01, 12), texts=4).prompt_logits == policy.PROMPT_LOGITS
    assert AdaptiveBudget(small, StepTimes((1, 12), (0.01, 0.013), 0.01)).prompt_logits == 0
    assert FixedBudget(lp.LookaheadConfig(window_size=4)).prompt_logits > 10**9


@pytest.mark.parametrize("chunk", [7, 16, 100])
def test_the_last_tokens_in_chunks(model: Any, told: Told, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """As many as are asked for, from the middle of a chunk on, and what a fixed budget reads of them."""
    monkeypatch.setattr(policy, "PROMPT_LOGITS", 10)
    monkeypatch.setattr(prompt_reader, "ROWS", 4)
    rows: list[int] = []
    decoder = lp.LookaheadDecoder(model, step_times=FREE)
    model.lm_head.register_forward_hook(lambda module, args, out: rows.append(args[0].shape[1]))
    tokens = decoder.generate(PROMPT, 12, prefill_chunk=chunk).tokens
    ends = [min(start + chunk, 39) for start in range(0, 39, chunk)]
    read = [min(max(end - 29, 0), end - start) for start, end in zip(range(0, 39, chunk), ends, strict=True)]
    assert sum(read) == 10 and rows[: len(read)] == [max(each, 1) for each in read]  # a model computes one at least
    ((prompt, top),) = told
    assert prompt == PROMPT[-11:] and len(top) == 10
    fixed = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4))
    assert fixed.generate(PROMPT, 12).tokens == tokens == lp.AutoregressiveDecoder(model).generate(PROMPT, 12).tokens
    (whole, all_top) = told[-1]
    assert whole == PROMPT and (all_top[-10:] == top).all()


def test_none_where_tokens_are_dear(model: Any, told: Told) -> None:
    lp.LookaheadDecoder(model, step_times=DEAR).generate(PROMPT, 4)
    assert told == []


def test_a_reused_prefix_has_none(model: Any, told: Told) -> None:
    """Tokens whose KV is reused are not computed again for their logits."""
    engine = lp.Engine(lp.LookaheadDecoder(model, step_times=FREE))
    for prompt in (PROMPT, [*PROMPT, 5, 7, 9]):
        handle = engine.submit(prompt, 4, eos_token_id=())
        engine.run()
    assert handle.reused > 30 and told[-1][0] == [*PROMPT, 5, 7, 9][handle.reused :]


def test_ranks_learn_the_same(model: Any, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "PROMPT_LOGITS", 10)

    def body(context: lp.ParallelContext) -> list[int]:
        return lp.LookaheadDecoder(model, context=context, step_times=FREE).generate(PROMPT, 12).tokens

    tokens = run_lockstep(3, body)
    assert tokens == [lp.AutoregressiveDecoder(model).generate(PROMPT, 12).tokens] * 3
    assert len(told) == 3 and all(prompt == PROMPT[-11:] and (top == told[0][1]).all() for prompt, top in told)
