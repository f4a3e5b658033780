"""kv_dtype=int8 and fp8: texts and logits are those of transformers' own code over keys and values that are rounded.

In float64 nothing else rounds, so that logits agree far below what a byte changes in them: a key that one path does
not round, or rounds twice, shows in every one of them.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import lp
from lp.engine.engine import Engine, slots_within_memory
from lp.models.tensor_parallel import divide
from lp.parallel.context import ParallelContext
from tests.support.captured import captured_runner
from tests.support.image_models import generated, image_model, image_prompt
from tests.support.rounded_kv import KINDS, OwnCache, rounded_greedy
from tests.support.thread_ranks import run_lockstep
from tests.support.tiny_models import drawn_text, tiny_model

FIXED = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
SHAPES = [FIXED, lp.LookaheadConfig(window_size=9, ngram_size=5, guess_set_size=3), lp.LookaheadConfig()]
SAMPLED = lp.SamplingParams(temperature=0.8, top_p=0.9, seed=5)
NEW = 24
IDS = drawn_text(random.Random(2), 40)
ARCHS = [
    "llama", "qwen2", "qwen3", "gemma3", "gpt_oss", "mixtral", "mistral_sliding", "qwen2_sliding", "phi3", "gpt2",
    "gemma3n", "gemma4", "deepseek_v3", "qwen3_5", "falcon_h1", "lfm2", "llama_dynamic",
]  # fmt: skip
CLOSE = 1e-6  # of logits, which `generate` rounds to float32; one byte a number changes them by a thousandth


def expected_logits(model: Any, kv_dtype: str, ids: list[int] = IDS) -> tuple[list[int], torch.Tensor]:
    """Tokens and raw logits (T, V) of transformers' own greedy text over rounded keys and values."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
        past_key_values=OwnCache(kv_dtype, model.config), return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits)


def same(output: lp.GenerationOutput, tokens: list[int], logits: torch.Tensor) -> bool:
    return output.tokens == tokens and bool((output.logits - logits).abs().max() < CLOSE)


@pytest.mark.subset(10)
@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_texts_and_logits(arch: str, kv_dtype: str) -> None:
    """Every decoder, steps of several shapes, prompts in chunks, captured steps."""
    model = tiny_model(arch)
    tokens, logits = expected_logits(model, kv_dtype)
    unrounded = lp.AutoregressiveDecoder(model).generate(IDS, NEW, output_logits=True)
    assert not same(unrounded, tokens, logits), "rounding that changes nothing tests nothing"
    decoders: list[Any] = [
        lp.AutoregressiveDecoder(model, kv_dtype=kv_dtype),
        lp.PlainDecoder(model, kv_dtype=kv_dtype),
    ]
    decoders += [lp.LookaheadDecoder(model, shape, kv_dtype=kv_dtype) for shape in SHAPES]
    for decoder in decoders:
        for chunk in (512, 7):
            assert same(decoder.generate(IDS, NEW, prefill_chunk=chunk, output_logits=True), tokens, logits)
    assert lp.LookaheadDecoder(model, FIXED).generate(IDS, NEW).tokens == unrounded.tokens, "of a runner of its own"
    if decoder.runner.boundary is None:
        captured_runner(decoder, probe=True)
        for _ in range(2):
            assert same(decoder.generate(IDS, NEW, output_logits=True), tokens, logits)


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("arch", ["llama", "gemma3", "mixtral"])
def test_sampled_texts_in_float32(arch: str, kv_dtype: str) -> None:
    """Against the oracle, which rounds with code of its own, under the same noise."""
    model = tiny_model(arch, dtype=torch.float32)
    plain = lp.AutoregressiveDecoder(model, kv_dtype=kv_dtype)
    for sampling in (None, SAMPLED):
        tokens = plain.generate(IDS, NEW, sampling).tokens
        for shape in SHAPES:
            assert lp.LookaheadDecoder(model, shape, kv_dtype=kv_dtype).generate(IDS, NEW, sampling).tokens == tokens
    assert plain.generate(IDS, NEW).tokens == rounded_greedy(model, IDS, NEW, kv_dtype)


@pytest.mark.subset(4)
@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_texts_in_one_batch_and_behind_prefixes(arch: str, kv_dtype: str) -> None:
    """A prefix is copied as its slots hold it: what an earlier text wrote is what this prompt would have written."""
    model = tiny_model(arch)
    prompts = [drawn_text(random.Random(index), 12 + 20 * index) for index in range(3)]
    with Engine(lp.LookaheadDecoder(model, FIXED, kv_dtype=kv_dtype), 3, 1500, prefill_chunk=16) as engine:
        for turn in range(3):
            handles = [engine.submit(ids, NEW, output_logits=True) for ids in prompts]
            engine.run()
            for ids, handle in zip(prompts, handles, strict=True):
                assert same(handle.result(), *expected_logits(model, kv_dtype, ids))
                assert bool(handle.reused) == (turn > 0)
            prompts = [[*ids, *handle.result().tokens, 3, 1] for ids, handle in zip(prompts, handles, strict=True)]
        engine._core._caches.pool.check()


@pytest.mark.parametrize("sync", ["recompute", "broadcast"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks(ranks: int, sync: str) -> None:
    """Ranks get each other's keys and values as they are stored, or compute them alike."""
    config = lp.LookaheadConfig(
        window_size=6, ngram_size=4, guess_set_size=9, ablation=lp.Ablation(kv_sync=lp.KVSync(sync))
    )
    for arch, kv_dtype in (("llama", "int8"), ("gemma3", "fp8"), ("qwen3_5", "int8")):
        model = tiny_model(arch)
        tokens = rounded_greedy(model, IDS, NEW, kv_dtype)

        def body(context: ParallelContext, model: Any = model, kv_dtype: str = kv_dtype) -> list[int]:
            return lp.LookaheadDecoder(model, config, context, kv_dtype=kv_dtype).generate(IDS, NEW).tokens

        assert run_lockstep(ranks, body) == [tokens] * ranks, arch


def test_ranks_that_differ_are_told() -> None:
    model = tiny_model()

    def body(context: ParallelContext) -> str:
        decoder = lp.LookaheadDecoder(model, FIXED, context, kv_dtype=KINDS[context.rank])
        with pytest.raises(ValueError, match="kv_dtype") as error:
            decoder.generate(IDS, NEW)
        return str(error.value)

    assert all("the kv_dtype of rank" in message for message in run_lockstep(2, body))


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_a_divided_model(kv_dtype: str) -> None:
    """Each rank of a replica stores its own heads, whose scales are their own; the oracle is divided, too."""
    model = tiny_model()
    tokens = rounded_greedy(model, IDS, NEW, kv_dtype)

    def body(context: ParallelContext) -> list[list[int]]:
        part = divide(copy.deepcopy(model), context.replica)
        plain = lp.AutoregressiveDecoder(part, context, kv_dtype).generate(IDS, NEW).tokens
        return [plain, lp.LookaheadDecoder(part, FIXED, context, kv_dtype=kv_dtype).generate(IDS, NEW).tokens]

    assert run_lockstep(2, body, tp=2) == [[tokens, tokens]] * 2
    assert run_lockstep(4, body, tp=2) == [[tokens, tokens]] * 4


@pytest.mark.subset(3)
@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("arch", ["llama", "gemma3", "mixtral"])
def test_bit_for_bit(arch: str, kv_dtype: str) -> None:
    """Rounding looks at nothing but the token's own row: equal bits stay equal."""
    model = tiny_model(arch, dtype=torch.float32)
    plain = lp.PlainDecoder(model, exact="bitwise", kv_dtype=kv_dtype)
    decoder = lp.LookaheadDecoder(model, FIXED, exact="bitwise", kv_dtype=kv_dtype)
    for sampling in (None, SAMPLED):
        expected = plain.generate(IDS, NEW, sampling, output_logits=True)
        output = decoder.generate(IDS, NEW, sampling, output_logits=True)
        assert output.tokens == expected.tokens and torch.equal(output.logits, expected.logits)
        as_they_are = lp.PlainDecoder(model, exact="bitwise").generate(IDS, NEW, sampling, output_logits=True)
        assert not torch.equal(output.logits[:1], as_they_are.logits[:1])


def test_images() -> None:
    """The model's own pass writes them, by the same cache."""
    model = image_model("gemma3")
    inputs = image_prompt("gemma3", 0, 1)
    expected = generated(model, inputs, NEW, past_key_values=OwnCache("int8", model.config))
    decoders: list[Any] = [lp.AutoregressiveDecoder(model, kv_dtype="int8"), lp.PlainDecoder(model, kv_dtype="int8")]
    for decoder in [*decoders, lp.LookaheadDecoder(model, FIXED, kv_dtype="int8")]:
        assert decoder.generate(**inputs, max_new_tokens=NEW).tokens == expected


def test_memory() -> None:
    """What is kept takes a byte a number and four a row, where a text has it and where an engine divides the memory."""
    model = tiny_model(dtype=torch.float32, head_dim=64)
    slots = {}
    for kv_dtype, bytes_a_row in (("auto", 64 * 4), ("int8", 64 + 4), ("fp8", 64 + 4)):
        decoder = lp.LookaheadDecoder(model, FIXED, kv_dtype=kv_dtype)
        output = decoder.generate(IDS, NEW)
        row_count = 2 * 2 * 2  # layers, heads, keys and values
        assert output.cache_bytes % (row_count * bytes_a_row) == 0
        assert len(IDS) + NEW <= output.cache_bytes // (row_count * bytes_a_row) < len(IDS) + NEW + 40
        slots[kv_dtype] = slots_within_memory(decoder, 1 << 60)
    assert slots["int8"] == pytest.approx(slots["auto"] * 256 / 68, rel=0.2)
    assert slots["fp8"] == pytest.approx(slots["int8"], rel=0.2)


def test_what_is_refused() -> None:
    """By name, with what to write instead."""
    decoders: list[Any] = [lp.LookaheadDecoder, lp.PlainDecoder, lp.AutoregressiveDecoder]
    for decoder in decoders:
        with pytest.raises(ValueError, match="kv_dtype is 'int4'; it must be one of auto, int8, fp8"):
            decoder(tiny_model(), kv_dtype="int4")
    with pytest.raises(ValueError, match="but Mamba2ForCausalLM has no attention, and so no keys"):
        lp.LookaheadDecoder(tiny_model("mamba2"), kv_dtype="int8")


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_in_transformers_generate(kv_dtype: str) -> None:
    model = tiny_model()
    prompt = torch.tensor([IDS])
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW, "do_sample": False}
    out = model.generate(prompt, **asked, custom_generate=lp.generate, kv_dtype=kv_dtype)
    assert out[0, len(IDS) :].tolist() == rounded_greedy(model, IDS, NEW, kv_dtype)
    of_transformers = GenerationConfig(cache_implementation="quantized")
    with pytest.raises(ValueError, match="quantized by its own kv_dtype='int8' or 'fp8'"):
        lp.generate(model, prompt, generation_config=of_transformers, attention_mask=asked["attention_mask"])
