"""Captured steps: the same logits as steps of any shape, whatever lies in the buffers."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lp
from lp.config import Capture
from lp.engine.generation import Generation
from lp.models.captured_step import BUCKETS
from lp.models.captured_steps import compiled_by_itself
from lp.models.graph_recorder import CaptureFailed, GraphRecorder
from lp.models.kv_cache import StaticKVCache
from lp.models.runner import ModelRunner
from tests.support.captured import captured_runner
from tests.support.layouts import drawn_layout, visible_of
from tests.support.tiny_models import drawn_text, tiny_model

ARCHS = ["llama", "gpt_neox", "mistral_sliding", "gemma3", "gpt2"]
BACKENDS = ["sdpa", "eager", "flash"]


def _uncompiled(model: PreTrainedModel, attention: str) -> ModelRunner:
    runner = ModelRunner(model, attention)
    runner._capture_steps(Capture.OFF, probe=False)
    return runner


def _captured(model: PreTrainedModel) -> lp.LookaheadDecoder:
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4))
    captured_runner(decoder)
    return decoder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile with a cache of its own: the user's may have what a killed process left half written."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_logits_are_those_of_an_open_shape(arch: str, backend: str) -> None:
    """Padding that is seen, the stale KV of a rejected draft token, or a cache slot off by one."""
    model = tiny_model(arch)
    plain, static = ModelRunner(model, backend), _uncompiled(model, backend)
    for seed in range(4):
        rng = random.Random(seed)
        text = drawn_text(rng, rng.randint(1, 60))
        with torch.inference_mode():
            caches = [runner.new_cache(len(text) + 200) for runner in (plain, static)]
            for runner, cache in zip((plain, static), caches, strict=True):
                runner.prefill(text, cache, 16)
            for _ in range(3):
                visible = visible_of(drawn_layout(rng))
                tokens = drawn_text(rng, len(visible))
                positions = [caches[0].length + int(row.sum()) - 1 for row in visible]
                logits_indices = sorted(rng.sample(range(len(tokens)), rng.randint(1, len(tokens))))
                accepted = [node for node in range(len(tokens)) if visible[len(tokens) - 1, node]]
                logits = []
                for runner, cache in zip((plain, static), caches, strict=True):
                    logits.append(runner.forward(tokens, positions, visible, cache, logits_indices).clone())
                    cache.commit(accepted)
                assert logits[0].shape == logits[1].shape
                tolerance = 1e-5 if backend == "eager" else 1e-12  # eager takes its softmax in float32
                assert float((logits[0] - logits[1]).abs().max()) < tolerance
    assert static.captured and {bucket for _, bucket in static.captured._steps} <= set(BUCKETS)


def test_texts_one_after_the_other() -> None:
    """What an earlier text left in the cache, or a longer one that needs a larger cache, must not show."""
    model = tiny_model("llama")
    decoder = _captured(model)
    rng, capacities = random.Random(0), set()
    for length in (5, 60, 5, 400, 5):
        ids = drawn_text(rng, length)
        plain = lp.AutoregressiveDecoder(model).generate(ids, 30)
        assert decoder.generate(ids, 30).tokens == plain.tokens
        assert decoder.runner.captured and decoder.runner.captured.cache is not None
        capacities.add(decoder.runner.captured.cache.capacity)
    assert len(capacities) == 2
    decoder.runner.captured.release()
    assert decoder.generate(ids, 30).tokens == plain.tokens


def test_compiled_steps_give_the_same_tokens(compiler: None) -> None:
    """One graph a bucket, compiled once: a length that were shape would compile again at every step."""
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1)
    config = lp.LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=1)  # 2 tokens: two buckets
    ids = drawn_text(random.Random(3), 40)
    plain = lp.LookaheadDecoder(model, config).generate(ids, 40)
    decoder = lp.LookaheadDecoder(model, config, capture="compile")
    with torch._dynamo.config.patch(error_on_recompile=True):
        captured = decoder.generate(ids, 40)
    assert (captured.tokens, captured.steps) == (plain.tokens, plain.steps)
    assert decoder.runner.captured
    largest = max(step.num_tokens for step in captured.step_stats)
    assert {bucket for _, bucket in decoder.runner.captured._steps} >= {size for size in BUCKETS if size < largest}


def _step(size: int) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        return torch.zeros(size) + size

    return forward


def test_every_step_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would take one for a change of another, compile it again, and stop after 8 times."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # dynamo's part alone
    with torch._dynamo.config.patch(error_on_recompile=True):
        steps = [compiled_by_itself(_step(size)) for size in range(1, 12)]
        for _ in range(2):
            for size, step in enumerate(steps, 1):
                assert step().tolist() == [size] * size


def test_what_cannot_be_captured_is_refused() -> None:
    """A graph of frequencies that change with the length would go on with those it was recorded with.

    StableLM does not hand the slot mapping to its attention, which would take other keys for the step's.
    """
    with pytest.raises(ValueError, match=r"captured steps: StableLm.* choose capture=off"):
        lp.LookaheadDecoder(tiny_model("stablelm"), capture="compile", attention="flash")
    with pytest.raises(ValueError, match="need a GPU; choose capture=off"):
        lp.LookaheadDecoder(tiny_model("llama"), capture="graph")
    with pytest.raises(ValueError, match="rotary frequencies change"):
        lp.LookaheadDecoder(tiny_model("llama_dynamic"), capture="compile")
    assert lp.LookaheadDecoder(tiny_model("llama_dynamic")).runner.captured is None


def test_a_step_that_no_graph_takes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`auto` goes on without; a fault of a step that was recorded is no reason to try again."""
    model, ids = tiny_model("llama"), drawn_text(random.Random(4), 30)
    plain = lp.AutoregressiveDecoder(model).generate(ids, 20).tokens

    def refuse(*_: object) -> None:
        raise CaptureFailed("operation not permitted when stream is capturing")

    decoder = _captured(model)
    with monkeypatch.context() as patch:
        patch.setattr(GraphRecorder, "record", refuse)
        decoder.runner._fallback = False
        with pytest.raises(CaptureFailed, match=r"can't be captured \(operation not.* choose capture=off"):
            decoder.generate(ids, 20)
        decoder.runner._fallback = True
        assert decoder.generate(ids, 20).tokens == plain
        assert decoder.runner.captured is None and "steps run uncaptured" in caplog.text
    decoder = _captured(model)
    decoder.runner._fallback = True
    assert decoder.generate(ids, 20).tokens == plain and decoder.runner.captured
    steps = decoder.runner.captured._steps
    steps |= {bucket: replace(step, run=refuse) for bucket, step in steps.items()}  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"^operation not permitted"):
        decoder.generate(ids, 20)


def test_steps_are_captured_up_to_a_size() -> None:
    """One that is never taken costs seconds and memory."""
    runner = _captured(tiny_model("llama")).runner
    assert runner.captured is not None
    with torch.inference_mode(), runner.borrowed_cache(200):
        for count in (1, 3):
            assert len(runner.captured.steps_up_to(BUCKETS[count - 1])) == count
        assert len(runner.captured.steps_up_to(BUCKETS[1] + 1)) == 3


def test_a_text_within_a_text() -> None:
    """A callback that generates with the same decoder would find the cache of the text that it interrupts."""
    model = tiny_model("llama")
    decoder, inner = _captured(model), list[list[int]]()
    ids = drawn_text(random.Random(1), 30)

    def on_tokens(tokens: list[int], step: int) -> None:
        if step == 3:
            inner.append(decoder.generate(ids[:9], 12).tokens)

    plain = lp.AutoregressiveDecoder(model)
    assert decoder.generate(ids, 40, on_tokens=on_tokens).tokens == plain.generate(ids, 40).tokens
    assert inner == [plain.generate(ids[:9], 12).tokens]
    assert decoder.runner.captured and not decoder.runner.captured.reserved


def test_a_nan_stays_in_its_text() -> None:
    """Whole buffers are read, masked or not, and zero times NaN is NaN."""
    model = tiny_model("llama")
    decoder, ids = _captured(model), drawn_text(random.Random(2), 30)
    plain = lp.AutoregressiveDecoder(model).generate(ids, 20)
    weight = model.get_input_embeddings().weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        decoder.generate(ids, 20)
    with torch.no_grad():
        weight.copy_(before)
    assert decoder.generate(ids, 20).tokens == plain.tokens


def test_caches_end_with_their_texts() -> None:
    """If layers and cache referred to each other, a GPU's buffers would pile up until Python looks for cycles."""
    model = tiny_model("llama")
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4))
    caches: list[weakref.ref[object]] = []
    new = decoder.runner.cache_without_buffers

    def new_cache(capacity: int) -> object:
        cache = new(capacity)
        caches.append(weakref.ref(cache))
        return cache

    decoder.runner.cache_without_buffers = new_cache  # type: ignore[method-assign, assignment]
    gc.disable()
    try:
        decoder.generate([1, 2, 3], 10)
        assert len(caches) == 1 and caches[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["nowhere", "callback", "cut off", "model", "capturing", "beginning"])
def test_errors_keep_no_cache(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After "out of memory" the next call needs the room that the text had, before Python looks for cycles."""
    decoder = lp.LookaheadDecoder(
        tiny_model("llama"), lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4)
    )
    caches: list[weakref.ref[object]] = []
    make, run = StaticKVCache.__init__, ModelRunner.forward_trees
    passes: list[int] = []

    def made(self: StaticKVCache, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        caches.append(weakref.ref(self))

    def full(*args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        if where == "model" and len(passes) < 3:
            return run(*args, **kwargs)
        raise torch.OutOfMemoryError("full")

    def fails(tokens: list[int], step: int) -> None:
        if where == "callback":
            raise ArithmeticError
        if where == "cut off":
            raise KeyboardInterrupt

    monkeypatch.setattr(StaticKVCache, "__init__", made)
    patched = {
        "model": (ModelRunner, "forward_trees"),
        "capturing": (Generation, "capture_steps"),
        "beginning": (decoder, "begin"),
    }
    if where in patched:
        monkeypatch.setattr(*patched[where], full)
    gc.collect()
    gc.disable()
    try:
        try:
            decoder.generate([1, 2, 3], 10, on_tokens=fails)
        except (ArithmeticError, KeyboardInterrupt, torch.OutOfMemoryError):
            assert where != "nowhere"
        else:
            assert where == "nowhere"
        assert len(caches) == (where != "beginning") and all(cache() is None for cache in caches)
    finally:
        gc.enable()
