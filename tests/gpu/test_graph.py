"""Captured steps against float64, against steps that are not captured, and against plain decoding.

The dry run on a CPU takes the same steps without capturing them, and says so.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import lp
from launch.bench.compare import differences
from lp.config import Capture
from lp.models import captured_steps
from lp.models.runner import ModelRunner
from tests.conftest import GPU_DRY_RUN
from tests.gpu.parity import DTYPES, PREFIXES, TOLERANCE, VOCABULARY, layer_of_7b, layouts, model_of, text
from tests.support.layouts import visible_of

pytestmark = pytest.mark.gpu
GRAPH = Capture.OFF if GPU_DRY_RUN else Capture.GRAPH
BACKENDS = ("sdpa", "eager", "flash")
CONFIG = lp.LookaheadConfig(window_size=5, ngram_size=4, guess_set_size=6)


@torch.inference_mode()
def _logits(
    model: PreTrainedModel, attention: str, capture: Capture, prefixes: tuple[int, ...], names: list[str]
) -> list[torch.Tensor]:
    """Logits of steps of these layouts behind these prefixes, shuffled, so that the next step has another size."""
    runner = ModelRunner(model, attention, capture, probe=False)
    cache = runner.new_cache(max(prefixes) + max(layout.num_nodes for layout in layouts().values()))
    cases = [(prefix, layouts()[name]) for prefix in prefixes for name in names]
    random.Random(0).shuffle(cases)
    found = []
    for prefix, layout in cases:
        cache.length = 0  # what a step before wrote, padding among it, is no part of this prefix
        if prefix:
            runner.prefill(text(prefix), cache, 512)
        positions = [prefix + at - layout.positions[0] for at in layout.positions]
        tokens = [token % VOCABULARY for token in layout.tokens]
        found.append(runner.forward(tokens, positions, visible_of(layout), cache, layout.sampled_tokens).clone())
    return found


def _error(output: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest error of a token's logits, relative to their norm."""
    assert [logits.shape for logits in output] == [logits.shape for logits in expected]
    errors = [(a.double() - b).norm(dim=1) / b.norm(dim=1) for a, b in zip(output, expected, strict=True)]
    return float(torch.cat(errors).max())


def _check(
    model: PreTrainedModel,
    attention: str,
    dtype: torch.dtype,
    capture: Capture,
    prefixes: tuple[int, ...],
    names: list[str],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("part", f"step, capture={capture}, {attention}")
    record_property("dtype", str(dtype).removeprefix("torch."))
    expected = _logits(copy.deepcopy(model).double(), "eager", Capture.OFF, prefixes, names)
    try:
        output = _logits(model, attention, capture, prefixes, names)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    plain = _error(_logits(model, attention, Capture.OFF, prefixes, names), expected)
    error, tolerance = (
        _error(output, expected),
        2 * plain + TOLERANCE[dtype],
    )  # padded steps may take kernels of another size
    record_property("error", error)
    record_property("tolerance", tolerance)
    assert error <= tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attention", BACKENDS)
def test_a_captured_step_is_as_near_float64_as_one_that_is_not(
    attention: str, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    """A graph replays what it was captured with: a length, a mask or a token of another step would be in its logits."""
    _check(model_of("GQA", 64, dtype, layers=2), attention, dtype, GRAPH, PREFIXES, list(layouts()), record_property)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_a_layer_of_real_width_is_as_near(
    attention: str, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    """Libraries take other kernels for the products of a 7B's layer than for small ones, and so do ours."""
    _check(layer_of_7b(dtype), attention, dtype, GRAPH, PREFIXES[:4], list(layouts()), record_property)


@pytest.mark.skipif(GPU_DRY_RUN, reason="compiling takes longer than a dry run may")
@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_a_compiled_step_is_as_near(attention: str, record_property: Callable[[str, object], None]) -> None:
    """A length that is compiled in is wrong behind the next prefix. One size alone: each is compiled by itself."""
    model = model_of("GQA", 64, torch.bfloat16, layers=2)
    _check(model, attention, torch.bfloat16, Capture.COMPILE, PREFIXES[2:], ["window alone"], record_property)


@pytest.mark.parametrize("attention", BACKENDS)
def test_captured_text_is_that_of_plain_decoding(
    attention: str, record_property: Callable[[str, object], None]
) -> None:
    """Token for token, over several texts of one decoder: what a graph held of one must not reach the next."""
    dtype = torch.float32 if GPU_DRY_RUN or attention != "flash" else torch.bfloat16
    model = model_of("GQA", 64, dtype, layers=2)
    record_property("part", f"text, capture={GRAPH}, {attention}")
    record_property("dtype", str(dtype).removeprefix("torch."))
    decoder = lp.LookaheadDecoder(model, CONFIG, attention=attention, capture=GRAPH)
    eager = lp.LookaheadDecoder(model, CONFIG, attention=attention, capture=Capture.OFF)
    methods = {"captured": decoder, "not captured": eager, "plain": lp.AutoregressiveDecoder(model)}
    for length in (40, 3, 90):
        prompt = text(length)
        tokens = {name: method.generate(prompt, 48).tokens for name, method in methods.items()}
        assert [found for found in differences(model, prompt, tokens, tokens["plain"]) if not found.near_tie] == []


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_texts_of_an_engine_are_those_of_plain_decoding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Texts that come and go share captured steps: where each lies in the pool is data, and so is what it samples."""
    monkeypatch.setattr(captured_steps, "UNCAPTURED", 0)
    model = model_of("GQA", 64, dtype, layers=2)
    record_property("part", f"several texts, capture={GRAPH}")
    record_property("dtype", str(dtype).removeprefix("torch."))
    engine = lp.Engine(lp.LookaheadDecoder(model, CONFIG, capture=GRAPH), cache_tokens=2048)
    prompts = [text(length) for length in (40, 3, 90, 17)]
    handles = [engine.submit(prompt, 48, eos_token_id=()) for prompt in prompts[:2]]
    for _ in range(4):
        engine.step()
    handles += [engine.submit(prompt, 32, eos_token_id=()) for prompt in prompts[2:]]
    engine.run()
    shared = engine._core._shared
    assert bool(shared and shared._steps) == (GRAPH is Capture.GRAPH)
    plain = lp.AutoregressiveDecoder(model)
    for prompt, handle in zip(prompts, handles, strict=True):
        tokens = handle.result().tokens
        alone = plain.generate(prompt, len(tokens), eos_token_id=()).tokens
        found = differences(model, prompt, {"engine": tokens, "plain": alone}, alone)
        assert [each for each in found if not each.near_tie] == []
