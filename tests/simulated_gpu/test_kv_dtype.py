"""kv_dtype on a simulated GPU: captured steps of one text and of several store rows, and read what others stored."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

import lp
from lp.attention.flash_cuda import TRITON
from lp.models import captured_forests
from tests.support.rounded_kv import KINDS, rounded_greedy
from tests.support.simulated_cuda.counts import CONFIG, NEW
from tests.support.simulated_cuda.simulation import SimulatedCuda
from tests.support.tiny_models import drawn_text, tiny_model

SAMPLED = lp.SamplingParams(temperature=0.8, seed=5)


@pytest.mark.subset(4)
@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("arch", ["llama", "gemma3", "phi3", "qwen3_5"])
def test_captured_steps_of_one_text(arch: str, kv_dtype: str, gpu: SimulatedCuda) -> None:
    """Twice, the second text over a cache that the first has filled; no step waits for the GPU to know a scale."""
    model = tiny_model(arch)
    ids = drawn_text(random.Random(arch), 30)
    decoder = lp.LookaheadDecoder(copy.deepcopy(model).to("cuda"), CONFIG, capture="graph", kv_dtype=kv_dtype)
    assert decoder.runner.captured is not None
    for sampling in (None, SAMPLED):
        expected = (
            lp.AutoregressiveDecoder(model, kv_dtype=kv_dtype).generate(ids, NEW, sampling, eos_token_id=()).tokens
        )
        assert decoder.generate(ids, NEW, sampling, eos_token_id=()).tokens == expected
        if sampling is None:
            assert expected == rounded_greedy(model, ids, NEW, kv_dtype)


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_captured_steps_of_several_texts(arch: str, kv_dtype: str, gpu: SimulatedCuda) -> None:
    """All slots of the pool are read, those of others and of nobody too: none of them may be a NaN."""
    model = tiny_model(arch, dtype=torch.float32)
    decoder = lp.LookaheadDecoder(copy.deepcopy(model).to("cuda"), CONFIG, capture="graph", kv_dtype=kv_dtype)
    plain = lp.AutoregressiveDecoder(model, kv_dtype=kv_dtype)
    texts = [drawn_text(random.Random(index), 20 + 30 * index) for index in range(3)]
    with lp.Engine(decoder, max_sequences=3, cache_tokens=1024) as engine:
        for _ in range(2):
            handles: list[Any] = [engine.submit(ids, NEW, eos_token_id=()) for ids in texts]
            engine.run()
            for ids, handle in zip(texts, handles, strict=True):
                assert handle.result().tokens == plain.generate(ids, NEW, eos_token_id=()).tokens
            texts = [[*ids, *handle.result().tokens, 3, 1] for ids, handle in zip(texts, handles, strict=True)]
        assert all(handle.result().reused for handle in handles)
        assert engine._core._shared is not None and engine._core._shared._steps


def test_large_pools_are_read_text_by_text(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make numbers of all slots of a pool in every layer takes longer than a step that is not captured."""
    monkeypatch.setattr(captured_forests, "MASKED_SLOTS", 512)
    model = copy.deepcopy(tiny_model(dtype=torch.float32)).to("cuda")
    for kv_dtype, slots, shared in (("int8", 512, True), ("int8", 513, False), ("auto", 513, TRITON)):
        decoder = lp.LookaheadDecoder(model, CONFIG, capture="graph", kv_dtype=kv_dtype)
        with lp.Engine(decoder, max_sequences=2, cache_tokens=slots) as engine:
            assert (engine._core._shared is not None) == shared
