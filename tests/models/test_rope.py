"""Rotary scalings that look at the largest position: `generate`'s tokens on both sides of their boundary."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedModel

import lp
from lp.models.loader import context_limit
from lp.models.rope import RopeBoundary, rope_boundary
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.switches import lookahead_config
from tests.support.tiny_models import BOUNDARY, VOCABULARY, plain_greedy, tiny_config, tiny_model

ARCHS = ["llama_dynamic", "llama_longrope", "phi3_longrope"]
LENGTHS = [1, 20, BOUNDARY - 2, BOUNDARY - 1, BOUNDARY, BOUNDARY + 1, BOUNDARY + 2, 2 * BOUNDARY]


def _draw(rng: random.Random) -> tuple[list[int], int, dict[str, Any]]:
    """A prompt that ends before, at or past the boundary, tokens to add, and W, N, G."""
    pattern = [rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 20))]
    shape = {"window_size": rng.randint(0, 10), "ngram_size": rng.randint(2, 6), "guess_set_size": rng.randint(0, 8)}
    return (pattern * 2 * BOUNDARY)[: rng.choice(LENGTHS)], rng.randint(20, 60), shape


@pytest.mark.subset(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_equals_generate(arch: str, cases: Callable[[int, int], range]) -> None:
    """A step across the boundary, a chunk with other frequencies, or a cache that was not refilled changes a token."""
    for case in cases(8, 60):
        rng = random.Random(f"rope-{arch}-{case}")
        ids, new, shape = _draw(rng)
        plain = plain_greedy(tiny_model(arch, seed=case), ids, new)
        model = tiny_model(arch, seed=case)
        for decoder in (lp.LookaheadDecoder(model, lp.LookaheadConfig(**shape)), lp.AutoregressiveDecoder(model)):
            tokens = decoder.generate(ids, new, prefill_chunk=rng.choice([7, 512])).tokens
            assert tokens == plain, f"{arch} case {case}: {type(decoder).__name__}, prompt {len(ids)}, {shape}"


def _on_ranks(
    ranks: int, model: PreTrainedModel, config: lp.LookaheadConfig, ids: list[int], new: int
) -> list[list[int]]:
    """The tokens of every rank, each with a model of its own: frequencies are state of the model."""

    def body(context: ParallelContext) -> list[int]:
        return lp.LookaheadDecoder(copy.deepcopy(model), config, context).generate(ids, new).tokens

    return run_lockstep(ranks, body)


@pytest.mark.parametrize("arch", ARCHS)
def test_ranks_equal_generate(arch: str, cases: Callable[[int, int], range]) -> None:
    """What a rank owes of the text before the boundary must be computed under the frequencies from before it."""
    for case in cases(3, 40):
        rng = random.Random(f"rope-ranks-{arch}-{case}")
        ids, new, shape = _draw(rng)
        config = lookahead_config(**shape, kv_sync=rng.choice(list(lp.KVSync)))
        plain = plain_greedy(tiny_model(arch, seed=case), ids, new)
        model = tiny_model(arch, seed=case)
        ranks = rng.choice([2, 3, 4])
        texts = _on_ranks(ranks, model, config, ids, new)
        assert texts == [plain] * ranks, f"{arch} case {case}: {ranks} ranks, {len(ids)}, {config}"


@pytest.mark.parametrize("arch", ARCHS)
def test_an_earlier_text_leaves_nothing(arch: str) -> None:
    """Dynamic frequencies stay in the model as far as the longest text grew; the next text must not begin there."""
    model = tiny_model(arch)
    ids = [(7 * i + 3) % VOCABULARY for i in range(BOUNDARY + 10)]
    expected = plain_greedy(tiny_model(arch), ids, 20)
    for decoder in (lp.LookaheadDecoder(model), lp.AutoregressiveDecoder(model)):
        lp.AutoregressiveDecoder(model).generate(ids * 2, 30)
        assert decoder.generate(ids, 20).tokens == expected


def test_steps_shrink_only_where_they_must() -> None:
    """Longrope past its boundary has one set of frequencies: plain steps there would give the speed away."""
    pattern = [3, 1, 4, 1, 5] * 40
    config = lp.LookaheadConfig(window_size=5, ngram_size=3, guess_set_size=5)

    def slots(arch: str, prompt: int) -> list[int]:
        output = lp.LookaheadDecoder(tiny_model(arch), config).generate(pattern[:prompt], 20)
        return [step.num_tokens for step in output.step_stats]

    assert slots("llama_longrope", BOUNDARY + 5)[0] > 5
    assert slots("llama_longrope", BOUNDARY + 1)[0] > 5  # `c` is the first token past it
    assert slots("llama_longrope", BOUNDARY)[0] == 1  # `c` is the last token below it
    assert set(slots("llama_dynamic", BOUNDARY + 5)) == {1}


def test_boundary_of_a_config() -> None:
    """A boundary read from the wrong field, or not at all, shows only in texts of thousands of tokens."""
    assert rope_boundary(tiny_config("llama")) is None
    for fixed in ("llama_linear", "llama_llama3", "llama_yarn", "gpt2", "deepseek_v3", "gemma3"):
        assert rope_boundary(tiny_config(fixed)) is None
    assert rope_boundary(tiny_config("llama_longrope")) == RopeBoundary(BOUNDARY)
    assert rope_boundary(tiny_config("phi3_longrope")) == RopeBoundary(BOUNDARY, refills=True)
    dynamic = rope_boundary(tiny_config("llama_dynamic"))
    assert dynamic == RopeBoundary(BOUNDARY, grows=True, stretched=8 * BOUNDARY)
    assert context_limit(tiny_model("llama_dynamic")) == 8 * BOUNDARY
    assert context_limit(tiny_model("llama_longrope")) == 512
    old = LlamaConfig(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=100)
    assert rope_boundary(old) == RopeBoundary(100, grows=True, stretched=200)


def test_layers_with_different_boundaries_are_refused() -> None:
    """Two boundaries would need two limits a step; a model like that must not run as if it had one."""
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    kinds = {kind: longrope | {"original_max_position_embeddings": at} for kind, at in (("full_attention", 40),)}
    one = Gemma3TextConfig(rope_parameters=kinds | {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})
    assert rope_boundary(one) == RopeBoundary(40)
    kinds["sliding_attention"] = longrope | {"original_max_position_embeddings": 50}
    with pytest.raises(ValueError, match=r"'gemma3_text' changes its rotary frequencies at \[40, 50\] tokens"):
        rope_boundary(Gemma3TextConfig(rope_parameters=kinds))


@pytest.mark.parametrize(("position", "limit"), [(0, 40), (39, 40), (40, 90), (60, 90)])
def test_limit_of_a_step(position: int, limit: int) -> None:
    """One position too many changes the frequencies of the whole step."""
    assert RopeBoundary(40).limit(position, 90) == limit
    assert RopeBoundary(40).limit(position, 20) == 20
    growing = RopeBoundary(40, grows=True)
    assert growing.limit(position, 90) == (limit if position < 40 else position + 1)


def test_chunks_of_a_long_prompt_are_as_one() -> None:
    """Every chunk of a prompt past the boundary must be rotated as the whole prompt is."""
    for arch in ARCHS:
        model = tiny_model(arch)
        runner = lp.LookaheadDecoder(model).runner
        ids = [(5 * i + 1) % VOCABULARY for i in range(2 * BOUNDARY)]
        with torch.inference_mode():
            keys = []
            for chunk in (9, 512):
                cache = runner.new_cache(3 * BOUNDARY)
                runner.prefill(ids[:-1], cache, chunk)
                keys.append(cache.layers[1].keys[:, :, : cache.length].clone())
        assert torch.allclose(keys[0], keys[1], atol=1e-6)
