"""exact="bitwise" on a simulated GPU: captured or not, alone or beside others, logits are plain decoding's bits."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

import lp
from tests.support.simulated_cuda import SYNC, SimulatedCuda
from tests.support.simulated_cuda.counts import steps_of
from tests.support.tiny_models import drawn_text, tiny_model

pytest.importorskip("triton", reason="attention by position needs Triton on a GPU")

CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
SAMPLED = lp.SamplingParams(temperature=0.8, seed=5)
NEW = 20


def on_gpu(model: Any) -> Any:
    return copy.deepcopy(model).to("cuda")


def logits_of(decoder: Any, ids: list[int], sampling: lp.SamplingParams | None = None) -> lp.GenerationOutput:
    output: lp.GenerationOutput = decoder.generate(ids, NEW, sampling, eos_token_id=(), output_logits=True)
    assert output.exact == "bitwise" and output.attention == "by_position"
    return output


def same(found: lp.GenerationOutput, expected: lp.GenerationOutput) -> bool:
    assert found.logits is not None and expected.logits is not None
    return found.tokens == expected.tokens and torch.equal(found.logits.cpu(), expected.logits.cpu())


@pytest.mark.subset(1)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_logits_are_plain_decodings(arch: str, gpu: SimulatedCuda) -> None:
    """What a graph baked in, a kernel that rounds otherwise in captured steps, a bucket that is no width."""
    model = tiny_model(arch, dtype=torch.bfloat16, sharpness=2.0)
    moved = on_gpu(model)
    plain = lp.PlainDecoder(moved, capture="off", exact="bitwise")
    for seed, sampling in enumerate((None, SAMPLED)):
        ids = drawn_text(random.Random(seed), 40 + 120 * seed)
        expected = logits_of(plain, ids, sampling)
        for capture in ("off", "graph"):
            found = logits_of(lp.LookaheadDecoder(moved, CONFIG, capture=capture, exact="bitwise"), ids, sampling)
            assert same(found, expected) and found.steps < expected.steps
            alone = lp.PlainDecoder(moved, capture=capture, exact="bitwise")
            assert same(logits_of(alone, ids, sampling), expected)
            captured = alone.runner.captured
            assert (captured is not None) == (capture == "graph")
            if captured:
                assert {bucket for _, bucket in captured._steps} <= set(alone.runner.widths)


@pytest.mark.subset(2)
@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize("drafts", [False, True])
def test_texts_beside_others_and_behind_reused_prefixes(drafts: bool, capture: str, gpu: SimulatedCuda) -> None:
    """In a pool each has keys elsewhere; a reused prefix has KV of captured steps where a prompt has that of a pass."""
    model = tiny_model("llama", dtype=torch.bfloat16, sharpness=2.0)
    moved = on_gpu(model)
    plain = lp.PlainDecoder(moved, capture="off", exact="bitwise")
    decoder: Any = lp.PlainDecoder(moved, capture=capture, exact="bitwise")
    if drafts:
        decoder = lp.LookaheadDecoder(moved, CONFIG, capture=capture, exact="bitwise")
    texts = [drawn_text(random.Random(index), 30 + 60 * index) for index in range(3)]
    with lp.Engine(decoder, max_sequences=3, cache_tokens=2048) as engine:
        for _ in range(2):
            handles = [engine.submit(ids, NEW, SAMPLED, eos_token_id=(), output_logits=True) for ids in texts]
            engine.run()
            for ids, handle in zip(texts, handles, strict=True):
                assert same(handle.result(), logits_of(plain, ids, SAMPLED))
            texts = [[*ids, *handle.result().tokens, 3, 1] for ids, handle in zip(texts, handles, strict=True)]
        assert handles[0].result().reused > len(texts[0]) // 2
        steps = engine._core._shared._steps if engine._core._shared else {}
        assert bool(steps) == (capture == "graph") and set(steps) <= set(decoder.runner.widths)


def test_padding_of_texts_side_by_side(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few widths are equal, a step has more padding than one sequence of it takes in the spare slots."""
    monkeypatch.setattr("lp.models.bitwise.equal_widths", lambda runner: (16, 256))
    moved = on_gpu(tiny_model("llama", dtype=torch.bfloat16, sharpness=2.0))
    decoder = lp.LookaheadDecoder(moved, CONFIG, capture="graph", exact="bitwise")
    texts = [drawn_text(random.Random(index), 30 + 60 * index) for index in range(3)]
    with lp.Engine(decoder, max_sequences=3, cache_tokens=2048) as engine:
        handles = [engine.submit(ids, 2 * NEW, SAMPLED, eos_token_id=()) for ids in texts]
        engine.run()
        assert set(engine._core._shared._steps) == {256}
    plain = lp.PlainDecoder(moved, capture="off", exact="bitwise")
    for ids, handle in zip(texts, handles, strict=True):
        assert handle.result().tokens == plain.generate(ids, 2 * NEW, SAMPLED, eos_token_id=()).tokens


def test_a_captured_step_waits_once(gpu: SimulatedCuda) -> None:
    """Where keys lie is data: a number of it on the host would be waited for, and no graph would take it."""
    model = on_gpu(tiny_model("llama", dtype=torch.float32))
    decoder = lp.LookaheadDecoder(model, CONFIG, capture="graph", exact="bitwise")
    assert max(step.total(SYNC) for step in steps_of(gpu, decoder, None)) == 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"capture": "compile"}, "capture is 'compile', whose kernels round otherwise"),
        ({"capture": "compile", "exact": "tokens", "attention": "by_position"}, "does not take attention=by_position"),
    ],
)
def test_what_the_mode_cannot_be_had_with_is_named(how: dict[str, str], said: str, gpu: SimulatedCuda) -> None:
    """Dropped in silence, the promise would be kept by luck."""
    with pytest.raises(ValueError, match=said):
        lp.LookaheadDecoder(on_gpu(tiny_model(dtype=torch.float32)), CONFIG, **{"exact": "bitwise"} | how)


def test_a_dtype_that_the_kernels_do_not_take(gpu: SimulatedCuda) -> None:
    """float64 runs on a CPU alone."""
    with pytest.raises(ValueError, match=r"attention=by_position takes no torch.float64 on a GPU"):
        lp.PlainDecoder(on_gpu(tiny_model(dtype=torch.float64)), exact="bitwise")
