"""Steps of several texts on a simulated GPU, captured: where each text's cache lies is data."""

from __future__ import annotations

import copy
import itertools
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as tf

import lp
from lp.attention import flash_cuda
from lp.attention.base import PooledView, View
from lp.attention.masks import StepMasks
from lp.engine import captured_tails
from lp.models import captured_forests, captured_steps
from lp.models.captured_step import BUCKETS
from lp.models.runner import ModelRunner
from lp.models.tree_pass import TreePass
from lp.parallel.context import ParallelContext
from lp.sampling.noise import NoiseCache
from lp.sampling.penalties import CountPenalty
from tests.conftest import some_of
from tests.support.adapted import active, add_adapters
from tests.support.engine_calls import Call, check_call, run_calls
from tests.support.simulated_cuda import on_host
from tests.support.simulated_cuda.events import KINDS, Events
from tests.support.simulated_cuda.ranks import run_on_gpus
from tests.support.simulated_cuda.simulation import SimulatedCuda
from tests.support.tiny_models import drawn_text, tiny_model

CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
SAMPLED = lp.SamplingParams(temperature=0.8, seed=3)
NEW = 16


pytestmark = pytest.mark.usefixtures("known_findings")


@pytest.fixture(autouse=True)
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are captured when they first come, but for the test of that."""
    if "seldom" not in request.node.name:
        monkeypatch.setattr(captured_steps, "UNCAPTURED", 0)


def engine_of(model: Any, config: lp.LookaheadConfig = CONFIG, **options: Any) -> lp.Engine:
    times = lp.StepTimes.constant(0.01, 64) if config.adaptive else None
    decoder = lp.LookaheadDecoder(copy.deepcopy(model).to("cuda"), config, capture="graph", step_times=times)
    return lp.Engine(decoder, **{"cache_tokens": 1500} | options)


def plain(model: Any, ids: list[int], sampling: lp.SamplingParams | None = None) -> list[int]:
    with on_host():
        return lp.AutoregressiveDecoder(model).generate(ids, NEW, sampling, eos_token_id=()).tokens


def graphs(step: Events) -> int:
    return sum(count for (_, what, _), count in step.items() if what == "graph")


def test_a_step_of_several_texts_is_two_graphs(gpu: SimulatedCuda) -> None:
    """Each layer's kernels would be launched one by one; and a text that began by itself must not keep it from that."""
    model = tiny_model()
    engine = engine_of(model)
    rng = random.Random(1)
    texts = [drawn_text(rng, 30) for _ in range(4)]
    first = engine.submit(texts[0], NEW, eos_token_id=())
    for _ in range(3):
        engine.step()
    handles = [first, *(engine.submit(ids, NEW, SAMPLED, eos_token_id=()) for ids in texts[1:])]
    engine.step()  # their prompts
    for _ in range(3):
        before = Events(gpu.events)
        engine.step()
        assert graphs(Events(gpu.events - before)) == 2  # the forward pass, and what is behind it
    engine.run()
    for handle, ids in zip(handles, texts, strict=True):
        assert handle.result().tokens == plain(model, ids, None if handle is first else SAMPLED)
    assert not engine.decoder.runner.captured.reserved  # type: ignore[attr-defined]


def asked_of(index: int, ids: list[int]) -> dict[str, Any]:
    """Arguments of a text that no other one has: what it is sampled with, and a penalty on counts for some."""
    if index == 4:
        return {"sampling": None}
    return {
        "sampling": lp.SamplingParams(
            temperature=0.5 + index / 10,
            top_k=(0, 20, 50)[index % 3],
            top_p=1 - 0.02 * index,
            min_p=0.01 * (index % 2),
            repetition_penalty=1 + 0.05 * (index % 3),
            seed=index,
        ),
        "logits_processor": [CountPenalty(len(ids), 0.5, 0.3)] if index % 4 == 1 else [],
    }


def test_texts_that_ask_for_different_things_take_few_launches(gpu: SimulatedCuda) -> None:
    """Sampled one by one outside the graph, eight texts would take 85 launches in every step, and wait twice."""
    model = tiny_model()
    engine = engine_of(model, max_sequences=8, cache_tokens=3000)
    rng = random.Random(1)
    texts = [drawn_text(rng, 20 + index) for index in range(8)]
    asked = [asked_of(index, ids) for index, ids in enumerate(texts)]
    calls = [*zip(texts, asked, strict=True)]
    handles = [engine.submit(ids, 4 * NEW, **own, eos_token_id=()) for ids, own in calls]
    found = []
    while all(not handle.done for handle in handles):
        before = Events(gpu.events)
        engine.step()
        found.append(Events(gpu.events - before))
    engine.run()
    steady = found[3:-1]  # behind the prompts, the first steps and their captures
    assert len(steady) > 4
    for step in steady:
        figures = [step.total(kind) for kind in KINDS]
        assert all(figure <= limit for figure, limit in zip(figures, (1, 6, 0), strict=True)), step.table()
    alone = lp.AutoregressiveDecoder(model)
    for handle, (ids, own) in zip(handles, calls, strict=True):
        assert handle.result().tokens == alone.generate(ids, 4 * NEW, **own, eos_token_id=()).tokens


def test_what_counts_as_generated_beside_other_texts(gpu: SimulatedCuda) -> None:
    """Penalties so strong that no token comes twice: a token of another text's step in its place would show."""
    model = tiny_model(sharpness=0.3)
    # Of five levels' window the middle ones sample nothing: logits have fewer rows than the pass has tokens.
    engine = engine_of(model, lp.LookaheadConfig(window_size=5, ngram_size=5, guess_set_size=6), cache_tokens=3000)
    calls = []
    for case in range(4):
        ids = drawn_text(random.Random(case), 3 + case)
        calls.append((ids, [CountPenalty(len(ids), 40.0, 0.0)]))
    handles = [engine.submit(ids, 12, logits_processor=penalty, eos_token_id=()) for ids, penalty in calls]
    engine.run()
    alone = lp.AutoregressiveDecoder(model)
    for handle, (ids, penalty) in zip(handles, calls, strict=True):
        assert handle.result().tokens == alone.generate(ids, 12, logits_processor=penalty, eos_token_id=()).tokens


def test_a_text_that_the_host_samples_beside_others(gpu: SimulatedCuda) -> None:
    """Its message is made apart; those of the others must not be read from where the graph copies them to the host."""
    model = tiny_model()
    engine = engine_of(model)
    rng = random.Random(4)
    texts = [drawn_text(rng, 30) for _ in range(3)]
    asked: list[dict[str, Any]] = [
        {"sampling": SAMPLED},
        {"sampling": SAMPLED, "logits_processor": [tf.NoRepeatNGramLogitsProcessor(2)]},
        {"sampling": None},
    ]
    calls = [*zip(texts, asked, strict=True)]
    handles = [engine.submit(ids, NEW, **own, eos_token_id=()) for ids, own in calls]
    engine.run()
    alone = lp.AutoregressiveDecoder(model)
    for handle, (ids, own) in zip(handles, calls, strict=True):
        assert handle.result().tokens == alone.generate(ids, NEW, **own, eos_token_id=()).tokens


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_text_that_leaves_the_graph_keeps_its_place(penalty: float, gpu: SimulatedCuda) -> None:
    """The host samples texts with other processors than the first one's. Their noise and counts stay where they are: a
    text that took their place would overwrite them.
    """
    model = tiny_model()
    engine = engine_of(model, max_sequences=4, cache_tokens=3000)
    rng = random.Random(1)
    new = [6, 40, 40, 40]  # the first text ends first, and the next one decides who is in the graph
    calls = []
    for index in range(4):
        own: dict[str, Any] = {
            "sampling": lp.SamplingParams(temperature=0.9, repetition_penalty=penalty, seed=index),
            "logits_processor": [tf.SuppressTokensLogitsProcessor([3], device="cuda")] if index in (0, 3) else [],
            "max_new_tokens": new[index],
            "eos_token_id": (),
        }
        calls.append((drawn_text(rng, 20 + index), own))
    handles = [engine.submit(ids, **own) for ids, own in calls]
    engine.run()
    alone = lp.AutoregressiveDecoder(copy.deepcopy(model).to("cuda"))
    for handle, (ids, own) in zip(handles, calls, strict=True):
        assert handle.result().tokens == alone.generate(ids, **own).tokens


@pytest.mark.parametrize("lacking", ["memory", "graph"])
def test_a_gpu_that_has_no_room_for_the_sampling_of_texts(
    lacking: str, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled outside the graph they need less; every text of every step would fail."""

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    buffer = NoiseCache.buffer
    if lacking == "memory":
        monkeypatch.setattr(NoiseCache, "buffer", lambda self, texts: full() if texts > 1 else buffer(self, texts))
    else:
        monkeypatch.setattr(captured_tails, "CapturedTail", full)
    model = tiny_model()
    engine = engine_of(model)
    for _ in range(2):
        texts = [drawn_text(random.Random(index), 20) for index in range(3)]
        samplings = [lp.SamplingParams(seed=index) if index else None for index in range(3)]
        calls = [*zip(texts, samplings, strict=True)]
        handles = [engine.submit(ids, NEW, sampling, eos_token_id=()) for ids, sampling in calls]
        engine.run()
        for handle, (ids, sampling) in zip(handles, calls, strict=True):
            assert handle.result().tokens == plain(model, ids, sampling)


def test_texts_that_come_and_go_are_sampled_by_few_graphs(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mixture of what they ask for would stop all texts for a capture; memory is made for texts that there are."""
    monkeypatch.setattr(captured_steps, "UNCAPTURED", 2)
    model = tiny_model()
    engine = engine_of(model, max_sequences=64, cache_tokens=3000)
    rng = random.Random(3)
    handles, calls = [], []
    for index in range(12):
        sampling = rng.choice([SAMPLED, None, lp.SamplingParams(temperature=0.7, top_k=9, top_p=0.9, seed=index)])
        calls.append((drawn_text(rng, 20), sampling))
        handles.append(engine.submit(calls[-1][0], NEW, sampling, eos_token_id=()))
        engine.step()
    tails, steps = engine._core._steps._pooled_tails, engine._core._shared._steps
    engine.run()
    assert tails is not None and any(step.tails for step in steps.values())
    assert all(len(step.tails) <= captured_tails.MOST_TAILS for step in steps.values())
    assert 1 < tails._room <= 16 and tails._own_memory
    for handle, (ids, sampling) in zip(handles, calls, strict=True):
        assert handle.result().tokens == plain(model, ids, sampling)


def test_two_engines_of_a_model_keep_their_noise_apart(gpu: SimulatedCuda) -> None:
    """Steps of one between those of the other would overwrite what it takes to be there."""
    model = tiny_model()
    engines = [engine_of(model)]
    engines.append(lp.Engine(engines[0].decoder, cache_tokens=1500))
    rng = random.Random(5)
    texts = [drawn_text(rng, 30) for _ in range(6)]
    samplings = [lp.SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=seed) for seed in range(6)]
    handles = [
        engines[index % 2].submit(ids, NEW, sampling, eos_token_id=())
        for index, (ids, sampling) in enumerate(zip(texts, samplings, strict=True))
    ]
    while any([engine.step() for engine in engines]):
        pass
    for handle, ids, sampling in zip(handles, texts, samplings, strict=True):
        assert handle.result().tokens == plain(model, ids, sampling)


def test_a_capture_leaves_a_cached_prefix_alone(gpu: SimulatedCuda) -> None:
    """The first text by itself may begin with a prefix: steps that are captured then run, and must move no KV of it."""
    model = tiny_model()
    engine = engine_of(model)
    rng = random.Random(2)
    texts = [drawn_text(rng, 30) for _ in range(2)]
    together = [engine.submit(ids, NEW, eos_token_id=()) for ids in texts]
    engine.run()
    ids = [*texts[0], *together[0].result().tokens[:5], 3]
    handle = engine.submit(ids, NEW, eos_token_id=())
    engine.run()
    assert handle.reused > 30 and handle.result().tokens == plain(model, ids)


@pytest.mark.subset(1)
@pytest.mark.parametrize("arch", some_of(["llama", "qwen2", "gemma3", "gpt_neox"], 2))
def test_texts_have_the_tokens_that_they_have_alone(arch: str, gpu: SimulatedCuda) -> None:
    """Arrivals, cancellations, reused prefixes, chunks of prompts; sliding windows, one KV head a query head."""
    for case in range(3):
        rng = random.Random(f"captured-{arch}-{case}")
        model = tiny_model(arch, seed=case)
        shared = drawn_text(rng, 40)
        calls = [Call(rng, shared) for _ in range(rng.randint(2, 6))]
        expected = [call.alone(lp.AutoregressiveDecoder(model)) for call in calls]
        config = rng.choice([CONFIG, lp.LookaheadConfig()])
        engine = engine_of(model, config, max_sequences=rng.randint(2, 5), prefill_chunk=rng.choice([7, 128]))
        handles = run_calls(engine, calls)
        for handle, call, output in zip(handles, calls, expected, strict=True):
            check_call(handle, call, output)
        assert engine._core._shared._steps, "none was captured"
        engine.clear_prefixes()
        assert engine.pool.free == engine.pool.capacity


def test_by_the_kernel_that_takes_several_sequences(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the keys of each text alone, however large the pool is; padding, too, needs keys that are there."""
    monkeypatch.setattr(captured_forests, "MASKED_SLOTS", 0)
    monkeypatch.setattr(flash_cuda, "kernel_for", lambda *_: "triton")
    model = tiny_model(hidden_size=64, dtype=torch.bfloat16, sharpness=5.0)
    engine = engine_of(model)
    assert engine.decoder.runner.attention == "flash"  # type: ignore[attr-defined]
    rng = random.Random(2)
    texts = [drawn_text(rng, count) for count in (1, 30, 7)]
    handles = [engine.submit(ids, NEW, eos_token_id=()) for ids in texts]
    engine.run()
    assert engine._core._shared._steps
    for handle, ids in zip(handles, texts, strict=True):
        assert handle.result().tokens == plain(model, ids)


@pytest.mark.parametrize("column", [None, 2, 3])
def test_a_kernel_that_is_wrong_with_several_sequences(
    column: int | None, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler's fault there shows in no trial with one sequence: texts would be wrong, and nothing would tell."""
    kernel = flash_cuda._triton

    def faulty(*arguments: Any) -> torch.Tensor:
        sequences_Q4 = arguments[-1].clone()
        if column is not None:
            sequences_Q4[:, column] -= 1
        return kernel(*arguments[:-1], sequences_Q4)

    monkeypatch.setattr(flash_cuda, "kernel_for", lambda *_: "triton")
    monkeypatch.setattr(flash_cuda, "_triton", faulty)
    monkeypatch.setattr(flash_cuda, "_error_of_sequences", flash_cuda._error_of_sequences.__wrapped__)
    states = torch.randn(1, 2, 8, 16).to("cuda")
    mask = torch.zeros(1, 1, 2, 2).to("cuda")
    table = torch.tensor([[0, 1, 1, 2], [1, 1, 5, 1]]).to("cuda")
    arguments = (states[:, :, :2], states, states, mask, None, torch.tensor([3, 6]).to("cuda"), table)
    with nullcontext() if column is None else pytest.raises(RuntimeError, match="over several sequences is off by"):
        assert flash_cuda.step_attention_on_cuda(*arguments).isfinite().all()


def test_a_pool_that_would_be_read_whole_is_not(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with a mask over the slots of all texts that there may be takes longer than launches do."""
    monkeypatch.setattr(captured_forests, "MASKED_SLOTS", 1000)
    engine = engine_of(tiny_model())
    assert engine._core._shared is None
    assert engine.pool.num_slots == engine.pool.capacity


@pytest.mark.parametrize("error", [captured_forests.CaptureFailed, torch.OutOfMemoryError])
def test_where_a_step_cannot_be_captured(
    error: type[Exception], gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The texts go on uncaptured: what the capture was to move is moved all the same; and no graph keeps memory."""
    model = tiny_model()
    engine = engine_of(model)
    rng = random.Random(3)
    texts = [drawn_text(rng, 20) for _ in range(3)]
    handles = [engine.submit(ids, NEW, eos_token_id=()) for ids in texts]
    for _ in range(4):
        engine.step()
    assert engine._core._shared._steps

    def fail(*_: Any) -> None:
        raise error("no room")

    captured = next(iter(engine._core._shared._steps))
    monkeypatch.setattr(engine.decoder.runner.captured, "capture", fail)  # type: ignore[attr-defined]
    del engine._core._shared._steps[captured]
    engine.run()
    assert caplog.text.count("steps of several texts are not captured: no room") == 1
    assert not engine._core._shared._steps
    for handle, ids in zip(handles, texts, strict=True):
        assert handle.result().tokens == plain(model, ids)


def test_a_kernel_that_refuses_several_sequences(
    gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its trial raises in the first pass of a capture: texts go on uncaptured; outside the capture all would fail."""
    build = StepMasks.build

    def refusing(self: StepMasks, view: View) -> Any:
        if isinstance(view, PooledView):
            raise RuntimeError("attention takes one sequence a step")
        return build(self, view)

    monkeypatch.setattr(StepMasks, "build", refusing)
    model = tiny_model()
    engine = engine_of(model)
    texts = [drawn_text(random.Random(index), 20) for index in range(3)]
    handles = [engine.submit(ids, NEW, eos_token_id=()) for ids in texts]
    engine.run()
    assert caplog.text.count("steps of several texts are not captured: attention takes one sequence a step") == 1
    for handle, ids in zip(handles, texts, strict=True):
        assert handle.result().tokens == plain(model, ids)


def test_a_size_that_comes_seldom_is_not_captured(gpu: SimulatedCuda) -> None:
    """A short batch would spend more time on captures than on its steps."""
    model = tiny_model()
    engine = engine_of(model, lp.LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=0))
    rng = random.Random(7)
    steps = captured_steps.UNCAPTURED + 4
    handles = [engine.submit(drawn_text(rng, 20), steps, eos_token_id=()) for _ in range(3)]
    captured_at = []
    while engine.step():
        captured_at.append(len(engine._core._shared._steps))
    assert all(handle.done for handle in handles)
    assert captured_at[captured_steps.UNCAPTURED - 1] == 0 and captured_at[-1] == 1


def test_a_size_that_comes_seldom_takes_a_larger_step(gpu: SimulatedCuda) -> None:
    """Launched one kernel after the other, each new size would take a host ten times as long, eight times over."""
    model = tiny_model()
    engine = engine_of(model, lp.LookaheadConfig(window_size=0, ngram_size=2, guess_set_size=0))
    rng = random.Random(7)
    first = captured_steps.UNCAPTURED + 4
    ends = (first, first + 1, first + 5)  # three texts, then two: a bucket of 4, then one of 2
    handles = [engine.submit(drawn_text(rng, 20), end, eos_token_id=()) for end in ends]
    sizes, replayed = set(), []
    while not handles[1].done:
        before = Events(gpu.events)
        engine.step()
        replayed.append(graphs(Events(gpu.events - before)) > 0)
        sizes |= engine._core._shared._steps.keys()
    engine.run()
    assert sizes == {4} and replayed[-1]
    assert replayed.count(False) == captured_steps.UNCAPTURED
    for handle, end in zip(handles, ends, strict=True):
        assert len(handle.result().tokens) == end


def test_what_a_failed_text_leaves_behind(gpu: SimulatedCuda) -> None:
    """Attention that reads all slots with a mask: a NaN in a free one would fail every later text."""
    model = tiny_model()
    engine = engine_of(model)
    rng = random.Random(4)
    texts = [drawn_text(rng, 20) for _ in range(3)]

    def fail(tokens: list[int], step: int) -> None:
        text = next(text for text, handle in engine._core.running.items() if handle is failing)
        for states in text.cache.buffers:
            states.fill_(torch.nan)
        raise RuntimeError("the caller's")

    failing = engine.submit(texts[0], NEW, eos_token_id=(), on_tokens=fail)
    handles = [engine.submit(ids, NEW, eos_token_id=()) for ids in texts[1:]]
    engine.run()
    with pytest.raises(RuntimeError, match="the caller's"):
        failing.result()
    for handle, ids in zip(handles, texts[1:], strict=True):
        assert handle.result().tokens == plain(model, ids)


def test_other_weights_are_captured_anew(gpu: SimulatedCuda) -> None:
    """A graph reads the memory of the weights that it was captured with."""
    model = tiny_model()
    on_gpu = copy.deepcopy(model).to("cuda")
    engine = lp.Engine(lp.LookaheadDecoder(on_gpu, CONFIG, capture="graph"), cache_tokens=1500)
    rng = random.Random(5)
    for change in range(2):
        if change:
            for each in (model, on_gpu):
                each.lm_head.weight = torch.nn.Parameter(each.lm_head.weight.detach().flip(0).clone())
        texts = [drawn_text(rng, 20) for _ in range(3)]
        handles = [engine.submit(ids, NEW, eos_token_id=()) for ids in texts]
        engine.run()
        for handle, ids in zip(handles, texts, strict=True):
            assert handle.result().tokens == plain(model, ids)


@pytest.mark.parametrize("most_moves", [0, 3, captured_forests.MOVES])
def test_more_moves_than_a_step_takes(most_moves: int, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted tokens of many texts: those that a step has no room for are moved before it."""
    monkeypatch.setattr(captured_forests, "MOVES", most_moves)
    model = tiny_model()
    engine = engine_of(model)
    texts = [[index, 5, 6, 7] * 6 for index in range(5)]
    handles = [engine.submit(ids, NEW, eos_token_id=()) for ids in texts]
    engine.run()
    for handle, ids in zip(handles, texts, strict=True):
        assert handle.result().tokens == plain(model, ids)


def test_two_ranks_with_a_gpu_each(gpu: SimulatedCuda) -> None:
    """Ranks of which each computes other tokens of each text, with buckets of its own."""
    model = tiny_model()
    rng = random.Random(6)
    texts = [drawn_text(rng, count) for count in (30, 3, 12)]
    samplings = (None, SAMPLED, SAMPLED)
    expected = [plain(model, ids, sampling) for ids, sampling in zip(texts, samplings, strict=True)]
    models = [copy.deepcopy(model).to(f"cuda:{rank}") for rank in range(2)]

    def body(context: ParallelContext, own: SimulatedCuda) -> list[list[int]]:
        engine = lp.Engine(
            lp.LookaheadDecoder(models[context.rank], CONFIG, context, capture="graph"), cache_tokens=1500
        )
        handles = [
            engine.submit(ids, NEW, sampling, eos_token_id=()) for ids, sampling in zip(texts, samplings, strict=True)
        ]
        engine.run()
        assert engine._core._shared._steps
        return [handle.result().tokens for handle in handles]

    assert run_on_gpus(2, body) == [expected, expected]


def test_every_bucket_has_places_for_its_padding(gpu: SimulatedCuda) -> None:
    """A capture runs a step of nothing but padding, of which a place holds no more than there are spare slots."""
    runner = ModelRunner(copy.deepcopy(tiny_model()).to("cuda"), capture=lp.Capture.GRAPH)
    with torch.inference_mode():
        for most_sequences in (1, 8):
            pool = captured_forests.pool_for(runner, 600)
            passes = captured_forests.CapturedForests(runner, pool, most_sequences)
            for bucket, smaller in itertools.pairwise([*reversed(BUCKETS), 0]):
                cache = pool.allocate(bucket)
                assert cache is not None
                tree = TreePass([1] * (smaller + 1), range(smaller + 1), range(-1, smaller), cache, [smaller])
                (logits,) = passes.forward([tree]).each()
                assert logits.shape[0] == 1 and logits.isfinite().all()
                pool.give_back(cache)
            assert len(passes._steps) == len(BUCKETS)


def test_a_block_is_not_freed_while_it_is_copied(gpu: SimulatedCuda) -> None:
    """A graph's copy keeps no pinned memory: it would be another block before the device has read it."""
    engine = engine_of(tiny_model(), prefill_chunk=4)
    handles = [engine.submit(list(range(1, 20)), NEW, prefill_chunk=4, eos_token_id=()) for _ in range(2)]
    engine.step()  # a part of a prompt, for which the host does not wait
    passes = engine._core._shared
    assert gpu.copies._pending and passes._steps

    pending: list[int] = []

    class Watched(dict[Any, Any]):
        def clear(self) -> None:
            pending.append(len(gpu.copies._pending))
            super().clear()

    passes._steps = Watched(passes._steps)
    passes._captured = None  # as if there were other weights
    engine.run()
    assert pending == [0] and all(handle.result().tokens for handle in handles)


def test_texts_that_choose_an_adapter_are_not_captured(gpu: SimulatedCuda) -> None:
    """A captured step runs the model as it is: an adapter would be left out, and only its own text would show it."""
    model = tiny_model()
    add_adapters(model)
    engine = engine_of(model)
    ids = drawn_text(random.Random(1), 30)
    handles = {name: engine.submit(ids, NEW, eos_token_id=(), adapter=name) for name in (None, "red", "blue")}
    engine.run()
    for name, handle in handles.items():
        with active(model, name):
            assert handle.result().tokens == plain(model, ids), name
    others = [engine.submit(ids, NEW, eos_token_id=()) for _ in range(2)]
    engine.step()  # their prompts
    before = Events(gpu.events)
    engine.step()
    assert graphs(Events(gpu.events - before)) == 2, "texts without one are captured again"
    engine.run()
    assert [handle.result().tokens for handle in others] == [plain(model, ids)] * 2
