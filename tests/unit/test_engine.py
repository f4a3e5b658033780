"""The engine: texts that come and go have the tokens that they have alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

import lp
from lp.engine.engine import Engine, Handle
from lp.parallel.thread_ranks import run_lockstep
from tests.tiny_models import ARCHITECTURES, CONTEXT, VOCABULARY, drawn_text, plain_greedy, tiny_model

FIXED = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
FLAT = lp.StepTimes.constant(0.01, 64)


class _Call:
    """One text of a mix: what is asked, when it comes, and when it is cancelled, in steps."""

    def __init__(self, rng: random.Random, shared: list[int]) -> None:
        begins = shared[: rng.randint(0, len(shared))] if rng.random() < 0.5 else []
        self.ids = [*begins, *drawn_text(rng, rng.randint(1, 60))]
        self.new = rng.randint(1, 40)
        self.options: dict[str, Any] = {"sequence": rng.randrange(5)}
        self.sampling = None
        if rng.random() < 0.5:
            top_p = rng.choice([1.0, 0.8])
            self.sampling = lp.SamplingParams(temperature=rng.choice([0.5, 1.0]), top_p=top_p, seed=rng.randrange(100))
        if rng.random() < 0.3:
            self.options["eos_token_id"] = [rng.randrange(VOCABULARY) for _ in range(3)]
        self.arrival = rng.choice([0, 0, rng.randint(1, 12)])
        self.cancelled_at = rng.randint(0, 10) if rng.random() < 0.15 else None

    def alone(self, decoder: lp.Decoder) -> lp.GenerationOutput:
        return decoder.generate(self.ids, self.new, self.sampling, **self.options)


def _run(engine: Engine, calls: list[_Call]) -> list[Handle]:
    handles: dict[int, Handle] = {}
    for step in itertools.count():
        for index, call in enumerate(calls):
            if call.arrival == step:
                handles[index] = engine.submit(call.ids, call.new, call.sampling, **call.options)
            if call.cancelled_at is not None and call.arrival + call.cancelled_at == step:
                engine.cancel(handles[index])
        left = engine.step()
        engine.pool.check()
        if not left and len(handles) == len(calls):
            break
    return [handles[index] for index in range(len(calls))]


def _check(handle: Handle, call: _Call, expected: lp.GenerationOutput) -> None:
    output = handle.result()
    if output.finish_reason == "cancelled":
        assert call.cancelled_at is not None
        assert output.tokens == expected.tokens[: len(output.tokens)]
    else:
        assert (output.tokens, output.finish_reason) == (expected.tokens, expected.finish_reason)


@pytest.mark.parametrize("ranks", [1, 2])
def test_texts_have_the_tokens_that_they_have_alone(cases: Callable[[int, int], range], ranks: int) -> None:
    """A sequence that sees another's cache, noise, logits or stop; a prefix that is reused too far; a lost slot."""
    reused = together = 0
    for case in cases(12, 150):
        rng = random.Random(f"engine-{ranks}-{case}")
        model = tiny_model(rng.choice(ARCHITECTURES), seed=rng.randrange(4))
        shared = drawn_text(rng, 40)
        calls = [_Call(rng, shared) for _ in range(rng.randint(1, 8))]
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
            calls: list[_Call] = calls,
            made: tuple[int, int, int] = (places, slots, chunk),
        ) -> tuple[Engine, list[Handle]]:
            decoder = lp.LookaheadDecoder(model, config, context, step_times=FLAT if config.adaptive else None)
            engine = Engine(decoder, *made)
            return engine, _run(engine, calls)

        for engine, handles in run_lockstep(ranks, body):
            for handle, call, output in zip(handles, calls, expected, strict=True):
                _check(handle, call, output)
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


def test_a_text_that_fails_fails_alone(model: Any) -> None:
    """A callback or criterion that raises must not cost other texts their tokens."""

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
    forward = decoder.runner.forward_forest
    decoder.runner.forward_forest = lambda trees: (  # type: ignore[method-assign]
        computed.append(sum(len(tree.tokens) for tree in trees)) or forward(trees)
    )
    changed = [*ids[:250], *[(token + 1) % VOCABULARY for token in ids[250:]]]
    handles = [engine.submit(changed, 10), engine.submit([*ids, *first.result().tokens[:4], 3], 10)]
    engine.run()
    del decoder.runner.forward_forest
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


def test_a_full_context_ends_a_text(model: Any) -> None:
    ids = drawn_text(random.Random(2), CONTEXT - 6)
    (output, other) = lp.LookaheadDecoder(model, FIXED).generate_batch([ids, ids[:9]], 50)
    assert (output.finish_reason, len(output.tokens)) == ("context", 6)
    assert len(other.tokens) == 50
