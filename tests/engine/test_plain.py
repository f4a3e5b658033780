"""PlainDecoder: the oracle's tokens, by the steps that lookahead takes, and nothing that only lookahead needs."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import lp
from lp.engine import batch_step, generation, step_sampler
from lp.engine.plain import NoDrafts
from lp.parallel.context import ParallelContext
from lp.parallel.rank_group import RankGroup
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import ARCHITECTURES, BOUNDARY, VOCABULARY, drawn_text, plain_greedy, tiny_model

SAMPLING: dict[str, lp.SamplingParams | None] = {
    "greedy": None,
    "coupled": lp.SamplingParams(temperature=0.9, top_p=0.95, seed=3),
    "rejection": lp.SamplingParams(temperature=0.9, seed=3, verifier=lp.Verifier.REJECTION),
}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of capture=compile run as they are: compiling takes half a minute, and tests of captured steps do it."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_its_tokens_are_the_oracles(arch: str) -> None:
    """Token for token, rejection sampling too: without drafts both make the same draws."""
    model = tiny_model(arch, dtype=torch.float64)
    ids = drawn_text(random.Random(arch), 30)
    plain, oracle = lp.PlainDecoder(model), lp.AutoregressiveDecoder(model)
    assert plain.generate(ids, 40, eos_token_id=()).tokens == plain_greedy(model, ids, 40)
    for sampling in SAMPLING.values():
        output = plain.generate(ids, 40, sampling, prefill_chunk=7)
        assert output.tokens == oracle.generate(ids, 40, sampling).tokens
        assert output.steps == len(output.tokens) and {step.num_tokens for step in output.step_stats} == {1}


@pytest.mark.parametrize("capture", ["off", "compile"])
def test_its_logits_are_the_oracles(capture: str, uncompiled: None) -> None:
    """Processors see the same text, and what is returned is of the same positions."""
    model = tiny_model(dtype=torch.float64)
    asked: dict[str, Any] = {"output_logits": True, "output_scores": True}
    asked["logits_processor"] = [RepetitionPenaltyLogitsProcessor(1.3)]
    ours = lp.PlainDecoder(model, capture=capture).generate([5, 9], 12, SAMPLING["coupled"], **asked)
    plain = lp.AutoregressiveDecoder(model).generate([5, 9], 12, SAMPLING["coupled"], **asked)
    assert ours.tokens == plain.tokens
    assert ours.logits is not None and plain.logits is not None and ours.scores is not None and plain.scores is not None
    for row, expected in ((ours.logits, plain.logits), (ours.scores, plain.scores)):
        assert torch.allclose(row, expected, atol=1e-4)  # captured steps may run kernels that round otherwise


@pytest.mark.parametrize("arch", ["llama_dynamic", "llama_longrope"])
def test_it_crosses_the_rotary_boundary(arch: str) -> None:
    """Its step there changes what is cached, as the oracle's does."""
    model = tiny_model(arch, sharpness=30.0)
    ids = [(7 * i + 3) % VOCABULARY for i in range(BOUNDARY - 12)]
    plain = lp.AutoregressiveDecoder(copy.deepcopy(model)).generate(ids, 40, eos_token_id=()).tokens
    assert lp.PlainDecoder(model).generate(ids, 40, eos_token_id=()).tokens == plain


def test_it_neither_drafts_nor_learns_nor_reads_top_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lookahead alone needs must not be in the time that it is compared with."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a plain step needs none of this")

    for owner, name in (
        *((NoDrafts, name) for name in ("propose", "begin", "observe")),
        (step_sampler, "pack_top_logits"),
        (batch_step, "pack_top_logits"),
        (generation.LookaheadWindow, "advance"),
        (generation.UnionTree, "merge"),
        (RankGroup, "broadcast"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    output = lp.PlainDecoder(tiny_model()).generate([1, 2, 3], 12, eos_token_id=())
    assert len(output.tokens) == 12 and all(step.idle and not step.num_draft for step in output.step_stats)


def test_it_runs_as_lookahead_does() -> None:
    """Speeds of another attention, or of steps that are not captured, would compare more than lookahead."""
    model = tiny_model()
    for asked in ({}, {"attention": "eager"}, {"capture": "compile"}):
        plain, ours = (
            lp.PlainDecoder(model, **asked).runner,
            lp.LookaheadDecoder(model, lp.PaperConfig(), **asked).runner,
        )
        assert plain.attention == ours.attention
        assert (plain.captured and plain.captured.mode) == (ours.captured and ours.captured.mode)
    with pytest.raises(ValueError, match="attention is 'slow'; it must be one of"):
        lp.PlainDecoder(model, attention="slow")


def test_ranks_decode_by_themselves() -> None:
    """Each for itself, without a message: ranks may even want texts of other lengths. Only a seed is shared."""
    model = tiny_model()
    drawn = lp.SamplingParams(temperature=1.0, seed=None)

    def body(context: ParallelContext) -> list[int]:
        return lp.PlainDecoder(model, context).generate([1, 2, 3], 10 + 5 * context.rank, drawn, eos_token_id=()).tokens

    short, long = run_lockstep(2, body)
    assert len(long) == 15 and long[:10] == short


def test_a_text_within_a_text(uncompiled: None) -> None:
    """The inner one must not get the cache that the outer one decodes with."""
    model = tiny_model()
    decoder = lp.PlainDecoder(model, capture="compile")
    inner: list[list[int]] = []

    def on_tokens(tokens: list[int], step: int) -> None:
        if step == 3:
            inner.append(decoder.generate([4, 5], 6).tokens)

    outer = decoder.generate([1, 2, 3], 12, on_tokens=on_tokens).tokens
    oracle = lp.AutoregressiveDecoder(model)
    assert outer == oracle.generate([1, 2, 3], 12).tokens and inner == [oracle.generate([4, 5], 6).tokens]
