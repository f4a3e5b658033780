"""The engine: texts that come and go have the tokens that they have alone."""

from __future__ import annotations

import gc
import os
import random
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, TypicalLogitsWarper

import lp
from lp.engine import batch_step
from lp.engine.core import Handle
from lp.engine.engine import Engine
from lp.models.captured_forests import pool_for
from lp.models.kv_cache import StaticKVCache
from lp.models.kv_pool import KVPool
from lp.models.runner import ModelRunner
from lp.parallel.thread_ranks import run_lockstep
from lp.sampling.noise import fill_noise
from tests.support.engine_calls import Call, check_call, run_calls
from tests.support.tiny_models import ARCHITECTURES, CONTEXT, VOCABULARY, drawn_text, plain_greedy, tiny_model

FIXED = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
FLAT = lp.StepTimes.constant(0.01, 64)


def test_a_warper_that_fails_fails_the_texts_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled together, they had its error taken for the model's: every text of the step failed."""
    model = tiny_model()
    warped, other = lp.SamplingParams(seed=3, typical_p=0.1), lp.SamplingParams(seed=3)
    expected = lp.AutoregressiveDecoder(model).generate([1, 2, 3], 20, other, eos_token_id=()).tokens
    calls: list[int] = []

    def fail(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 4:
            raise ZeroDivisionError("from the warper")
        return scores

    monkeypatch.setattr(TypicalLogitsWarper, "__call__", fail)
    engine = Engine(lp.LookaheadDecoder(model, FIXED), 4, 400)
    handles = [engine.submit([1, 2, 3], 20, sampling, eos_token_id=()) for sampling in (warped, warped, other, None)]
    engine.run()
    assert [type(handle.error) for handle in handles] == [ZeroDivisionError] * 2 + [type(None)] * 2
    assert handles[2].result().tokens == expected
    assert handles[3].result().tokens == plain_greedy(model, [1, 2, 3], 20)


@pytest.mark.parametrize("plain_s", [0.02, 0.03])
def test_plain_steps_that_seem_slower_than_others(plain_s: float) -> None:
    """As a busy machine may time them: what two texts gain a second was divided by zero, or less than nothing."""
    model, prompts = tiny_model(), [[1, 2, 3], [4, 5, 6]]
    times = lp.StepTimes((1, 64), (0.01, 0.01), plain_s)
    engine = Engine(lp.LookaheadDecoder(model, lp.LookaheadConfig(adaptive=True), step_times=times), 2, 400)
    handles = [engine.submit(prompt, 20, eos_token_id=()) for prompt in prompts]
    for _ in range(4):
        engine.step()
        assert all(text.budget.company.tokens_per_s >= 0 for text in engine._core.running)
    engine.run()
    assert [handle.result().tokens for handle in handles] == [plain_greedy(model, prompt, 20) for prompt in prompts]


def test_texts_are_sampled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one they have the same tokens, and the host's time for each of them is felt in every step."""
    together: list[int] = []
    sample = batch_step.node_sampling

    def noting(texts: Any, *args: Any) -> Any:
        together.append(len(texts))
        return sample(texts, *args)

    monkeypatch.setattr(batch_step, "node_sampling", noting)
    engine = Engine(lp.LookaheadDecoder(tiny_model(), FIXED), 4, 400)
    handles = [engine.submit([index, 2, 3], 12, eos_token_id=()) for index in range(3)]
    engine.run()
    steps = [handle.result().steps for handle in handles]
    assert together.count(3) == min(steps) and set(together) <= {1, 2, 3}


def test_noise_that_could_not_be_made_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may lack for all texts together and not for one: what was never computed would be taken for noise."""
    model = tiny_model()
    texts = [drawn_text(random.Random(index), 20) for index in range(2)]
    samplings = [lp.SamplingParams(temperature=0.9, repetition_penalty=1.2, seed=index) for index in range(2)]
    calls: list[int] = []

    def fill(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("once")
        fill_noise(*args)

    engine = Engine(lp.LookaheadDecoder(model, FIXED), cache_tokens=2000)
    pairs = [*zip(texts, samplings, strict=True)]
    handles = [engine.submit(ids, 24, sampling, eos_token_id=()) for ids, sampling in pairs]
    monkeypatch.setattr("lp.sampling.noise.fill_noise", fill)
    engine.run()
    monkeypatch.undo()
    assert len(calls) > 3
    alone = lp.AutoregressiveDecoder(model)
    for handle, (ids, sampling) in zip(handles, pairs, strict=True):
        assert handle.result().tokens == alone.generate(ids, 24, sampling, eos_token_id=()).tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_texts_have_the_tokens_that_they_have_alone(cases: Callable[[int, int], range], ranks: int) -> None:
    """A sequence that sees another's cache, noise, logits or stop; a prefix that is reused too far; a lost slot."""
    reused = together = 0
    for case in cases(8, 150):
        rng = random.Random(f"engine-{ranks}-{case}")
        model = tiny_model(rng.choice(ARCHITECTURES), seed=rng.randrange(4))
        shared = drawn_text(rng, 40)
        calls = [Call(rng, shared) for _ in range(rng.randint(1, 8))]
        plain = lp.AutoregressiveDecoder(model)
        expected = [call.alone(plain) for call in calls]
        config = rng.choice([FIXED, FIXED, lp.LookaheadConfig()])
        places = rng.randint(1, 8)
        chunk = rng.choice([1, 7, 128])
        slots = rng.choice([400, 4000])

        def body(
            context: lp.ParallelContext,
            model: Any = model,
            config: Any = config,
            calls: list[Call] = calls,
            made: tuple[int, int, int] = (places, slots, chunk),
        ) -> tuple[Engine, list[Handle]]:
            decoder = lp.LookaheadDecoder(model, config, context, step_times=FLAT if config.adaptive else None)
            engine = Engine(decoder, *made)
            return engine, run_calls(engine, calls)

        for engine, handles in run_lockstep(ranks, body):
            for handle, call, output in zip(handles, calls, expected, strict=True):
                check_call(handle, call, output)
            assert not engine.running and not engine.waiting
            engine.clear_prefixes()
            assert engine.pool.free == engine.pool.capacity
            reused += sum(handle.reused for handle in handles)
            together += places > 1 and len(calls) > 1
    assert reused and together


@pytest.mark.parametrize("arch", ["qwen3_5", "llama_dynamic", "gemma3"])
def test_models_whose_passes_take_one_text(arch: str) -> None:
    """Recurrent states and shifting frequencies are of one text: they are computed one after another."""
    rng = random.Random(3)
    model = tiny_model(arch, seed=1)
    prompts = [drawn_text(rng, length) for length in (1, 30, 61)]
    outputs = lp.LookaheadDecoder(model, FIXED).generate_batch(prompts, 30)
    assert [output.tokens for output in outputs] == [plain_greedy(model, ids, 30) for ids in prompts]


def test_plain_decoding_in_a_batch() -> None:
    rng = random.Random(5)
    model = tiny_model("llama", seed=1)
    prompts = [drawn_text(rng, length) for length in (1, 30, 61)]
    outputs = lp.PlainDecoder(model).generate_batch(prompts, [9, 20, 30])
    expected = [plain_greedy(model, ids, new) for ids, new in zip(prompts, [9, 20, 30], strict=True)]
    assert [output.tokens for output in outputs] == expected
    assert [output.steps for output in outputs] == [9, 20, 30]


def test_the_texts_of_a_batch_have_noise_of_their_own(model: Any) -> None:
    """One prompt several times would give one text several times; each is that of its index alone."""
    sampling = lp.SamplingParams(temperature=1.0, seed=11)
    decoder = lp.LookaheadDecoder(model, FIXED)
    found = [output.tokens for output in decoder.generate_batch([[1, 2, 3]] * 3, 20, sampling, sequence=4)]
    assert found == [decoder.generate([1, 2, 3], 20, sampling, sequence=index).tokens for index in (4, 5, 6)]
    assert found[0] != found[1] != found[2]


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_a_text_that_fails_fails_alone(arch: str) -> None:
    """A callback or criterion that raises must not cost other texts their tokens, computed together or in turn."""
    model = tiny_model(arch, seed=1)

    class Raises(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] == 25:
                raise RuntimeError("a criterion")
            return torch.zeros(1, dtype=torch.bool)

    def fails(tokens: list[int], step: int) -> None:
        raise RuntimeError("a callback")

    engine = Engine(lp.LookaheadDecoder(model, FIXED))
    ids = drawn_text(random.Random(1), 20)
    handles = [
        engine.submit(ids, 30),
        engine.submit(ids, 30, on_tokens=fails),
        engine.submit(ids, 30, stopping_criteria=[Raises()]),
        engine.submit(ids, 20),
    ]
    engine.run()
    expected = plain_greedy(model, ids, 30)
    assert [handles[0].result().tokens, handles[3].result().tokens] == [expected, expected[:20]]
    assert handles[2].tokens and handles[2].tokens == expected[: len(handles[2].tokens)], "until it failed"
    for handle, reason in ((handles[1], "a callback"), (handles[2], "a criterion")):
        with pytest.raises(RuntimeError, match=reason):
            handle.result()
    engine.pool.check()
    engine.clear_prefixes()
    assert engine.pool.free == engine.pool.capacity


def test_a_prompt_begins_behind_its_longest_cached_prefix(model: Any) -> None:
    """Reuse is to the token, of ended and of running texts, and nobody computes what is there."""
    rng = random.Random(2)
    ids = drawn_text(rng, 300)
    decoder = lp.LookaheadDecoder(model, FIXED)
    engine = Engine(decoder)
    first = engine.submit(ids, 10)
    engine.run()
    assert first.reused == 0
    computed: list[int] = []
    forward = decoder.runner.forward_trees
    decoder.runner.forward_trees = lambda trees, **how: (  # type: ignore[method-assign]
        computed.append(sum(len(tree.tokens) for tree in trees)) or forward(trees, **how)
    )
    changed = [*ids[:250], *[(token + 1) % VOCABULARY for token in ids[250:]]]
    handles = [engine.submit(changed, 10), engine.submit([*ids, *first.result().tokens[:4], 3], 10)]
    engine.run()
    del decoder.runner.forward_trees
    assert [handle.reused for handle in handles] == [250, 304]
    assert 49 < computed[0] < 49 + 40, "the rest of one prompt beside a step of the other text"
    assert sum(computed) < 300
    for handle, prompt in ((handles[0], changed), (handles[1], [*ids, *first.result().tokens[:4], 3])):
        assert handle.result().tokens == plain_greedy(model, prompt, 10)
        assert handle.result().reused == handle.reused


def test_what_never_fits_is_refused(model: Any) -> None:
    engine = Engine(lp.LookaheadDecoder(model, FIXED), cache_tokens=100)
    with pytest.raises(ValueError, match=r"90 tokens.*engine has 100; lower max_new_tokens"):
        engine.submit(list(range(1, 61)) + [1] * 30, 20)
    handle = engine.submit([1, 2, 3], 20)
    engine.run()
    assert handle.done


def test_a_text_that_just_fits_begins(model: Any) -> None:
    """What needs all slots is admitted when all are free, those of kept prefixes too."""
    decoder = lp.LookaheadDecoder(model, FIXED)
    large = Engine(decoder)
    slots = large._core.slots(large.submit([1, 2, 3], 20).request)
    engine = Engine(decoder, cache_tokens=slots)
    for _ in range(2):
        handle = engine.submit([1, 2, 3], 20)
        for _ in range(40):
            engine.step()
        assert handle.done and handle.result().tokens == plain_greedy(model, [1, 2, 3], 20)


def test_what_texts_gain_together_is_told_to_each(model: Any) -> None:
    """Tokens a second of them all: the one pass counts once, and of what else a step takes each text has its own."""
    times = lp.StepTimes((1, 64), (0.011, 0.011), 0.010)  # 1 ms of a step is not the pass
    config = lp.LookaheadConfig(adaptive=True, window_size=4, ngram_size=3, guess_set_size=6)
    engine = Engine(lp.LookaheadDecoder(model, config, step_times=times))
    handles = [engine.submit([index, 2, 3], 30) for index in range(3)]
    while any(handle.generation is None or not handle.generation.stats for handle in handles):
        engine.step()
    texts = [handle.generation for handle in handles if handle.generation]
    gains = [text.budget.tokens_per_step for text in texts]
    engine._core._tell_company(texts, 0)
    for text in texts:
        assert text.budget.company.texts == 3
        assert text.budget.company.tokens_per_s == pytest.approx(sum(gains) / (0.011 + 2 * 0.001))


def test_a_batch_of_other_lengths(model: Any) -> None:
    decoder = lp.LookaheadDecoder(model, FIXED)
    with pytest.raises(ValueError, match="max_new_tokens has 2 values for 3 prompts"):
        decoder.generate_batch([[1], [2], [3]], [4, 5])
    seen: list[int] = []
    outputs = decoder.generate_batch(
        [[1], [2, 3]], 6, on_tokens=lambda index, tokens, step: seen.extend([index] * len(tokens))
    )
    assert sorted(seen) == [0] * 6 + [1] * 6
    assert [len(output.tokens) for output in outputs] == [6, 6]
    assert decoder.generate_batch([]) == []


def test_what_can_be_read_once_is_of_every_text_of_a_batch(model: Any) -> None:
    """An iterator of criteria that the first text uses up would leave the others without them."""

    class Ends(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= 6])

    outputs = lp.LookaheadDecoder(model, FIXED).generate_batch([[1], [2, 3]], 9, stopping_criteria=iter([Ends()]))
    assert [(len(output.tokens), output.finish_reason) for output in outputs] == [(5, "criteria"), (4, "criteria")]


def test_a_full_context_ends_a_text(model: Any) -> None:
    ids = drawn_text(random.Random(2), CONTEXT - 6)
    (output, other) = lp.LookaheadDecoder(model, FIXED).generate_batch([ids, ids[:9]], 50)
    assert (output.finish_reason, len(output.tokens)) == ("context", 6)
    assert len(other.tokens) == 50


def test_callbacks_may_cancel(model: Any) -> None:
    """A text that leaves in the middle of a step would be ended twice, or commit to slots that it has given back."""
    ids = drawn_text(random.Random(1), 20)
    sampling = lp.SamplingParams(seed=1)
    for reuses in (True, False):
        engine = Engine(lp.LookaheadDecoder(model, FIXED), reuse_prefixes=reuses)
        handles: list[Handle] = []

        def cancel(*which: int, handles: list[Handle] = handles, engine: Engine = engine) -> Callable[..., None]:
            return lambda tokens, step: [engine.cancel(handles[index]) for index in which] and None

        for new, cancelled in ((1, [0]), (40, [1, 2]), (40, []), (40, []), (40, [5]), (40, [])):
            handles.append(engine.submit(ids, new, sampling, on_tokens=cancel(*cancelled)))
        while engine.step():
            engine.pool.check()
        reasons = [handle.result().finish_reason for handle in handles]
        assert reasons == ["length", "cancelled", "cancelled", "length", "length", "cancelled"]
        expected = handles[3].result().tokens
        assert all(handle.tokens == expected[: len(handle.tokens)] for handle in handles)


def test_a_step_within_a_step_or_after_one_that_was_cut_off(model: Any) -> None:
    """Texts whose step is half done must not go on: one that ended there would have tokens behind its end."""
    engine = Engine(lp.LookaheadDecoder(model, FIXED))
    within = engine.submit([1, 2, 3], 5, on_tokens=lambda tokens, step: engine.run())
    other = engine.submit([1, 2, 3], 5)
    engine.run()
    with pytest.raises(RuntimeError, match="within a step"):
        within.result()
    assert other.result().tokens == plain_greedy(model, [1, 2, 3], 5)

    def leave(tokens: list[int], step: int) -> None:
        raise SystemExit

    engine.submit([1, 2, 3], 5, on_tokens=leave)
    with pytest.raises(SystemExit):
        engine.step()
    with pytest.raises(RuntimeError, match="cut one off"):
        engine.step()


def test_a_signal_ends_a_run_or_a_step_and_nothing_later(model: Any) -> None:
    """The signal of an earlier run would end every text that comes after it."""
    engine = Engine(lp.LookaheadDecoder(model, FIXED))
    sampling = lp.SamplingParams(seed=2)
    expected = [*engine.decoder.generate([1, 2, 3], 30, sampling).tokens]

    def interrupt(tokens: list[int], step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    first = engine.submit([1, 2, 3], 30, sampling, on_tokens=interrupt)
    engine.run()
    assert (first.result().finish_reason, engine.signal) == ("interrupted", signal.SIGINT)
    second = engine.submit([1, 2, 3], 30, sampling, on_tokens=interrupt)
    with pytest.raises(KeyboardInterrupt):
        while engine.step():
            pass
    assert not second.done
    while engine.step():
        pass
    assert (second.result().tokens, second.result().finish_reason) == (expected, "length")


def test_an_ended_text_holds_its_output_alone(model: Any) -> None:
    """The noise of a sampled text is as large as a step's logits, and a batch may have thousands of texts."""
    engine = Engine(lp.LookaheadDecoder(model, FIXED))

    def fails(tokens: list[int], step: int) -> None:
        raise RuntimeError("a callback")

    sampling = lp.SamplingParams(seed=1)
    handles = [engine.submit([1, 2, 3], 5, sampling, on_tokens=callback) for callback in (None, fails, None, None)]
    engine.cancel(handles[2])
    engine._core.admit()
    engine.cancel(handles[3])
    held = [weakref.ref(text) for text in engine._core.running]
    engine.run()
    assert all(handle.done and handle.generation is None and not hasattr(handle, "request") for handle in handles)
    handles[1].error = None  # whose traceback has the step
    gc.collect()
    assert [ref() for ref in held] == [None] * 2


@pytest.mark.parametrize("places", [2, 3])
def test_frequencies_that_grow_with_one_text_are_not_anothers(places: int) -> None:
    """Dynamic NTK scaling keeps the frequencies of the longest pass so far, whichever text it was of."""
    for case in range(4):
        rng = random.Random(f"growing-{places}-{case}")
        model = tiny_model("llama_dynamic", seed=case)
        decoder = lp.LookaheadDecoder(model, FIXED)
        prompts = [drawn_text(rng, rng.randint(1, 90)) for _ in range(4)]
        expected = [decoder.generate(ids, 30).tokens for ids in prompts]
        assert [output.tokens for output in decoder.generate_batch(prompts, 30, max_sequences=places)] == expected


def test_a_source_that_fails_while_it_learns_fails_its_own_text(model: Any) -> None:
    """It learns beside the exchange, and its text may end in that same step."""
    decoder = lp.LookaheadDecoder(model, FIXED)
    decoder.merges_late = True
    engine = Engine(decoder)
    handles = [engine.submit([1, 2, 3], new) for new in (2, 9)]
    engine.step()
    engine.step()
    text = handles[0].generation
    assert text is not None and text._merge

    def fails() -> None:
        raise RuntimeError("a source")

    text._merge = fails
    engine.run()
    assert str(handles[0].error) == "a source"
    assert handles[1].result().tokens == plain_greedy(model, [1, 2, 3], 9)


def test_a_text_that_cannot_begin_ends_a_batch(model: Any) -> None:
    """The other texts must not be generated to their end for nothing."""
    decoder = lp.LookaheadDecoder(model, FIXED)
    source_of, steps = decoder.source, []

    def source(request: Any) -> Any:
        if len(request.prompt) == 1:
            raise RuntimeError("a source")
        return source_of(request)

    decoder.source = source  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a source"):
        decoder.generate_batch([[1, 2], [3]], 50, on_tokens=lambda index, tokens, step: steps.append(step))
    assert len(steps) < 2


def test_sizes_of_a_batch_are_checked(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts as (1, L), fewer places where memory is short, and refusals that name what was asked."""
    decoder = lp.LookaheadDecoder(model, FIXED)
    prompts = [[[1] * 50], torch.tensor([[2] * 40])]
    expected = [plain_greedy(model, ids, 5) for ids in ([1] * 50, [2] * 40)]
    assert [output.tokens for output in decoder.generate_batch(prompts, 5)] == expected
    with pytest.raises(ValueError, match="max_new_tokens is -50"):
        decoder.generate_batch([[1], [2]], -50)
    with pytest.raises(ValueError, match=r"KV cache of 1000000000000 slots.*are free; lower the engine's cache_tokens"):
        Engine(decoder, cache_tokens=10**12)
    with pytest.raises(ValueError, match="AutoregressiveDecoder has no steps"):
        Engine(lp.AutoregressiveDecoder(model))  # type: ignore[arg-type]
    monkeypatch.setattr("lp.engine.engine.free_bytes", lambda device: 0)
    assert [output.tokens for output in decoder.generate_batch(prompts, 5)] == expected, "one after the other"


@pytest.mark.parametrize("make", [lp.PlainDecoder, lambda model: lp.LookaheadDecoder(model, FIXED)])
def test_a_signal_before_a_step_computes_ends_no_text(make: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that catches Ctrl-C and steps on had a text with 1 of 30 tokens."""
    engine = Engine(make(model))
    handle = engine.submit([1, 2, 3], 30, eos_token_id=())
    engine.step()
    advance = engine._core._advance

    def interrupted() -> Any:
        signal.raise_signal(signal.SIGINT)
        return advance()

    with monkeypatch.context() as patched:
        patched.setattr(engine._core, "_advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.step():
        pass
    assert (handle.result().finish_reason, len(handle.result().tokens)) == ("length", 30)


class _Fails(LogitsProcessor):
    """Once there are a few tokens."""

    per_branch = True

    def __init__(self, error: BaseException) -> None:
        self.error = [error]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 6:
            raise self.error.pop()
        return scores


PLACES = ["nowhere", "callback", "step", "memory", "interrupt", "cut off", "first pass", "later pass"]


@pytest.mark.parametrize("where", PLACES)
def test_a_batch_that_failed_leaves_no_memory(model: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A server that tries again would be out of memory: nothing tells Python's gc how large the KV caches are."""
    pools: list[weakref.ref[Any]] = []
    caches: list[weakref.ref[Any]] = []  # whose tensors are views of the pool's
    passes = []
    allocate, forward = KVPool.allocate, ModelRunner.forward_trees

    def noted_cache(pool: KVPool, slots: int) -> Any:
        cache = allocate(pool, slots)
        caches.append(weakref.ref(cache))
        return cache

    def failing_forward(runner: ModelRunner, trees: Any, **how: Any) -> Any:
        passes.append(len(trees))
        if where == "first pass" or (where == "later pass" and len(passes) > 3):
            raise torch.OutOfMemoryError
        return forward(runner, trees, **how)

    def noted(*args: Any) -> Any:
        pool = pool_for(*args)
        pools.append(weakref.ref(pool))
        return pool

    def on_tokens(index: int, tokens: list[int], step: int) -> None:
        if where == "interrupt":
            signal.raise_signal(signal.SIGINT)
        if where in ("callback", "cut off"):
            raise ValueError if where == "callback" else KeyboardInterrupt

    monkeypatch.setattr("lp.engine.engine.pool_for", noted)
    monkeypatch.setattr(KVPool, "allocate", noted_cache)
    decoder = lp.LookaheadDecoder(model, FIXED)
    _ = decoder.runner.known_kinds  # which takes a pass
    monkeypatch.setattr(ModelRunner, "forward_trees", failing_forward)
    gc.collect()
    gc.disable()
    try:
        for prompts in ([[1, 2, 3], [4, 5, 6]], [[1, 2, 3]] * (2 if where == "later pass" else 1)):
            error = {"step": ValueError(), "memory": torch.OutOfMemoryError()}.get(where)
            failing = [_Fails(error)] if error else []
            del error
            try:
                decoder.generate_batch(prompts, 10, on_tokens=on_tokens, logits_processor=failing)
            except (ValueError, KeyboardInterrupt, torch.OutOfMemoryError):
                assert where != "nowhere"
            else:
                assert where == "nowhere"
        assert len(pools) == 2 and len(caches) >= 3
        assert not any(held() for held in [*pools, *caches])
    finally:
        gc.enable()


def test_a_closed_engine_says_so(model: Any) -> None:
    """It has no caches any more, whoever holds its texts, and these have ended."""
    decoder = lp.LookaheadDecoder(model, FIXED)
    with Engine(decoder, max_sequences=1) as engine:
        pool = weakref.ref(engine.pool)
        handle, waits = engine.submit([1, 2, 3], 9, output_scores=True), engine.submit([1, 2, 3], 9)
        engine.step()
        engine.step()
        assert handle.generation is not None
        cache = weakref.ref(handle.generation.cache)
    assert not pool() and not cache() and not engine.running
    assert handle.result().finish_reason == waits.result().finish_reason == "cancelled"
    output = handle.result()
    assert output.tokens and not waits.result().tokens
    assert output.scores is not None and len(output.scores) == len(output.tokens) and output.steps == 1
    engine.__exit__(None, None, None)
    for call in (engine.step, engine.run, engine.clear_prefixes, lambda: engine.submit([1, 2, 3])):
        with pytest.raises(RuntimeError, match="closed; make another"):
            call()


def test_a_model_of_another_dtype_needs_another_engine() -> None:
    """Its cache has no room for other values: a KeyError from within, and the other texts were lost."""
    model = tiny_model(dtype=torch.float32)
    decoder = lp.LookaheadDecoder(model, FIXED)
    engine = Engine(decoder)
    waits = engine.submit([1, 2, 3], 9)
    model.double()
    message = "the model is float64 on cpu now, and this engine's cache is for float32"
    with pytest.raises(lp.UserError, match=message):
        engine.submit([1, 2, 3], 9)
    with pytest.raises(lp.UserError, match=message):
        engine.step()
    model.float()
    engine.run()
    assert waits.result().tokens == plain_greedy(model, [1, 2, 3], 9)
    model.double()
    other = Engine(decoder)
    handle = other.submit([1, 2, 3], 9)
    other.run()
    assert handle.result().tokens == plain_greedy(model, [1, 2, 3], 9)


def test_an_engine_that_is_closed_while_a_text_begins(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was neither among those that wait nor among those that run, and never ended."""

    def begin(*args: Any) -> Any:
        raise KeyboardInterrupt

    decoder = lp.LookaheadDecoder(model, FIXED)
    monkeypatch.setattr(decoder, "begin", begin)
    with pytest.raises(KeyboardInterrupt), Engine(decoder) as engine:
        handles = [engine.submit([1, 2, 3], 9) for _ in range(2)]
        engine.step()
    assert [handle.result().finish_reason for handle in handles] == ["cancelled"] * 2


def test_a_signal_that_is_ignored_ends_nothing(model: Any) -> None:
    """A process whose end is another one's affair, as that of a rank that a server has started."""
    engine = Engine(lp.LookaheadDecoder(model, FIXED))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        handle = engine.submit([1, 2, 3], 9, on_tokens=lambda tokens, step: os.kill(os.getpid(), signal.SIGINT))
        while engine.step():
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert handle.result().finish_reason == "length"


def test_an_engine_whose_caches_fail_ends(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what is left of those that others have: texts went on with wrong tokens, or waited for ever."""
    engine = Engine(lp.LookaheadDecoder(model, FIXED), cache_tokens=400)
    prompt = drawn_text(random.Random(1), 40)
    engine.submit(prompt, 3, eos_token_id=())
    engine.run()

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(StaticKVCache, "begin_with", full)
    engine.submit([*prompt, 1], 20, eos_token_id=())
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    with pytest.raises(RuntimeError, match="an error has cut one off"):
        engine.step()
