"""exact="bitwise": the kernels of attention by position as they are compiled, and texts in every way that they may run.

The dry run on a CPU takes the same texts without capturing them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lp
from lp.attention.base import Window
from tests.conftest import GPU_DRY_RUN
from tests.gpu.parity import DEVICE, DTYPES, VOCABULARY, model_of
from tests.support.by_position_cases import LENGTHS, SMALL, Case, differing, worst_error
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu
compiled = pytest.mark.skipif(GPU_DRY_RUN, reason="a compiled kernel needs a GPU; an interpreter has its test")
FACTOR = 4  # of the interpreter's tolerance: tensor cores add in an order of their own, and not all bits of a sum
LARGE = {
    f"{heads} heads, {kv_heads} of keys, dimension {dim}, window {window}, {dtype}": Case(
        (*LENGTHS, 3000), heads, kv_heads, 64, dim, window=window, dtype=dtype
    )
    for heads, kv_heads in ((32, 8), (8, 8))
    for dim in (64, 80, 128)
    for window in (None, Window(300), Window(300, chunked=True))
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
}
CASES = SMALL | LARGE
CONFIG = lp.LookaheadConfig(window_size=5, ngram_size=4, guess_set_size=6)
SAMPLED = lp.SamplingParams(temperature=0.8, seed=5)
CAPTURES = ("off",) if GPU_DRY_RUN else ("off", "graph")
NEW = 24


@compiled
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_are_their_oracle(name: str, record_property: Callable[[str, object], None]) -> None:
    """Shared memory, alignment and tensor cores are not interpreted."""
    pytest.importorskip("triton", reason="the kernels need Triton")
    record_property("part", "attention by position")
    record_property("dtype", str(CASES[name].dtype).removeprefix("torch."))
    error = worst_error(CASES[name], DEVICE)
    record_property("error", error)
    record_property("tolerance", FACTOR)
    assert error <= FACTOR


@compiled
@pytest.mark.parametrize("name", CASES)
def test_a_token_has_the_same_bits_in_any_company(name: str) -> None:
    """Which rows tensor cores compute together, and what the compiler makes of other strides, shows on a GPU alone."""
    pytest.importorskip("triton", reason="the kernels need Triton")
    assert differing(CASES[name], DEVICE) == []


def models(dtype: torch.dtype) -> dict[str, Any]:
    """Models that the mode runs in different ways: one with fused layers, one with sliding windows."""
    return {
        "llama": model_of("GQA", 64, dtype, layers=2),
        "gemma3": tiny_model("gemma3", dtype=dtype, sharpness=2.0).to(DEVICE),
    }


def drawn_ids(model: Any, seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(min(VOCABULARY, model.config.get_text_config().vocab_size)) for _ in range(count)]


def logits_of(decoder: Any, ids: list[int]) -> lp.GenerationOutput:
    output: lp.GenerationOutput = decoder.generate(ids, NEW, SAMPLED, eos_token_id=(), output_logits=True)
    assert output.exact == "bitwise" and output.attention == "by_position"
    return output


def same(found: lp.GenerationOutput, expected: lp.GenerationOutput) -> bool:
    assert found.logits is not None and expected.logits is not None
    return found.tokens == expected.tokens and torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_logits_are_plain_decodings(arch: str, dtype: torch.dtype) -> None:
    """Captured or not: a product of another width, a reduction that knows how many rows there are."""
    model = models(dtype)[arch]
    plain = lp.PlainDecoder(model, capture="off", exact="bitwise")
    for count in (40, 450):
        ids = drawn_ids(model, count, count)
        expected = logits_of(plain, ids)
        for capture in CAPTURES:
            assert same(logits_of(lp.PlainDecoder(model, capture=capture, exact="bitwise"), ids), expected)
            found = logits_of(lp.LookaheadDecoder(model, CONFIG, capture=capture, exact="bitwise"), ids)
            assert same(found, expected), capture


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capture", CAPTURES)
def test_texts_beside_others_and_behind_reused_prefixes(capture: str, dtype: torch.dtype) -> None:
    """In a pool keys lie elsewhere; a reused prefix has KV of captured steps where a prompt has that of a pass."""
    model = models(dtype)["llama"]
    plain = lp.PlainDecoder(model, capture="off", exact="bitwise")
    decoder = lp.LookaheadDecoder(model, CONFIG, capture=capture, exact="bitwise")
    texts = [drawn_ids(model, index, 30 + 90 * index) for index in range(4)]
    with lp.Engine(decoder, max_sequences=4, cache_tokens=4096) as engine:
        for _ in range(2):
            handles = [engine.submit(ids, NEW, SAMPLED, eos_token_id=(), output_logits=True) for ids in texts]
            engine.run()
            for ids, handle in zip(texts, handles, strict=True):
                assert same(handle.result(), logits_of(plain, ids))
            texts = [[*ids, *handle.result().tokens, 3, 1] for ids, handle in zip(texts, handles, strict=True)]
        assert handles[0].result().reused > len(texts[0]) // 2
