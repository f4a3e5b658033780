"""The engine among ranks, whose caches lack different tokens and on one of which something may fail."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import lp
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import drawn_text, tiny_model

FIXED = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
IDS = drawn_text(random.Random(1), 20)


def _sampling(seed: int) -> lp.SamplingParams:
    return lp.SamplingParams(seed=seed)


def _alone(model: Any, prompt: list[int], new: int, seed: int) -> list[int]:
    return lp.LookaheadDecoder(model, FIXED).generate(prompt, new, _sampling(seed)).tokens


@pytest.mark.parametrize("prompt_logits", [True, False])
def test_prefixes_are_alike_on_all_ranks(model: Any, prompt_logits: bool) -> None:
    """A rank lacks the KV of what others computed: the end of a text is cached on some ranks alone."""
    config = lp.LookaheadConfig(
        window_size=4, ngram_size=3, guess_set_size=6, ablation=lp.Ablation(prompt_logits=prompt_logits)
    )

    def body(context: lp.ParallelContext) -> tuple[list[Any], int]:
        engine = lp.Engine(lp.LookaheadDecoder(model, config, context), prefill_chunk=3)
        seen: list[Any] = []
        text = IDS
        for turn in range(4):  # a chat: each prompt begins with the last answer
            handle = engine.submit(text, 25, _sampling(turn))
            engine.run()
            seen.append((handle.reused, text, turn, handle.result().tokens))
            text = [*text, *handle.result().tokens, 5, 7]
        running = engine.submit(IDS, 60, _sampling(9))
        while len(running.tokens) < 30:
            engine.step()
        text = [*IDS, *running.tokens, 5, 7]
        handle = engine.submit(text, 20, _sampling(8))
        engine.run()
        seen.append((handle.reused, text, 8, handle.result().tokens))
        return seen, engine.pool.free

    (seen, free), (others, others_free) = run_lockstep(2, body)
    assert (seen, free) == (others, others_free)
    for reused, prompt, seed, tokens in seen:
        assert tokens == _alone(model, prompt, len(tokens), seed)
        assert reused >= len(prompt) - 30 if prompt != IDS else not reused


@pytest.mark.parametrize("where", ["callback", "last callback", "prompt", "step"])
def test_a_failure_on_one_rank_is_one_texts(model: Any, where: str) -> None:
    """Ranks whose prompts, free slots or reasons to stop differ would wait for each other for ever."""

    def fails(*_: object) -> None:
        raise RuntimeError("on one rank")

    def body(context: lp.ParallelContext) -> tuple[list[Any], int, int]:
        decoder = lp.LookaheadDecoder(model, FIXED, context)
        engine = lp.Engine(decoder, prefill_chunk=3)
        handles = [engine.submit(IDS[:5], 60, _sampling(1))]
        engine.step()
        engine.step()
        callback = fails if context.rank == 1 and "callback" in where else None
        handles.append(engine.submit(IDS, 1 if where == "last callback" else 9, _sampling(2), on_tokens=callback))
        engine.step()
        if context.rank == 1 and "callback" not in where:
            text = handles[1].generation
            assert text is not None
            engine.step()
            name = "top_logits" if where == "prompt" else "message"
            if where == "step":
                while not text.prompt.is_cached(text.cache):
                    engine.step()
            setattr(text.step_sampler, name, fails)
        engine.run()
        handles.append(engine.submit([*IDS, 3, 4], 9, _sampling(3)))
        engine.run()
        engine.pool.check()
        results = [str(handle.error) if handle.error else handle.result().tokens for handle in handles]
        return results, handles[2].reused, engine.pool.free

    (first, *alike), (second, *others) = run_lockstep(2, body)
    assert alike == others
    assert first[0] == second[0] == _alone(model, IDS[:5], 60, 1)
    assert second[1] == "on one rank"
    assert first[2] == second[2] == _alone(model, [*IDS, 3, 4], 9, 3)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_prompt_that_fails_on_one_rank_behind_a_cached_prefix(model: Any, failing: int) -> None:
    """What it sends in place of the prompt's logits must be as long as what the others wait for."""
    config = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)

    def fails(*_: object) -> None:
        raise RuntimeError("on one rank")

    def body(context: lp.ParallelContext) -> list[Any]:
        engine = lp.Engine(lp.LookaheadDecoder(model, config, context), prefill_chunk=3)
        handles = [engine.submit(IDS, 9)]
        engine.run()
        for _ in range(2):
            handles.append(engine.submit([*IDS, 3, 4, 5, 6, 7], 9))
            with torch.inference_mode():  # as in a step
                engine._core.admit()
            text = handles[-1].generation
            assert text is not None
            if context.rank == failing and len(handles) == 2:
                text.step_sampler.top_logits = fails  # type: ignore[assignment,method-assign]
            engine.run()
        assert handles[1].reused and handles[2].reused
        return [str(handle.error) if handle.error else handle.result().tokens for handle in handles]

    results = run_lockstep(2, body)
    assert results[failing][1] == "on one rank"
    expected = lp.LookaheadDecoder(model, config).generate([*IDS, 3, 4, 5, 6, 7], 9).tokens
    assert [result[2] for result in results] == [expected, expected]


def test_a_prompt_that_fails_on_one_rank_where_texts_take_turns() -> None:
    """The rank where it failed must know that the others go on to the first step."""
    model = tiny_model("qwen3_5", seed=1)

    def body(context: lp.ParallelContext) -> list[Any]:
        decoder = lp.LookaheadDecoder(model, FIXED, context)
        engine = lp.Engine(decoder)
        handles = [engine.submit(IDS, 20)]
        engine.step()
        engine.step()
        handles.append(engine.submit(IDS[:9], 9, logits_processor=()))
        engine._core.admit()
        text = handles[1].generation
        assert text is not None
        if context.rank == 1:
            text.step_sampler.top_logits = None  # type: ignore[assignment,method-assign]
        engine.run()
        return [type(handle.error) if handle.error else handle.result().finish_reason for handle in handles]

    assert run_lockstep(2, body) == [["length", "interrupted"], ["length", TypeError]]


def test_a_batch_ends_alike_where_a_callback_fails_in_the_last_step_of_a_text(model: Any) -> None:
    """Nobody tells the other ranks, which must not be left in the steps of the other texts."""

    def body(context: lp.ParallelContext) -> Any:
        decoder = lp.LookaheadDecoder(model, FIXED, context)

        def fails(index: int, tokens: list[int], step: int) -> None:
            if index == 0 and context.rank == 1:
                raise RuntimeError("on one rank")

        try:
            return [len(output.tokens) for output in decoder.generate_batch([IDS, IDS[:5]], [1, 30], on_tokens=fails)]
        except RuntimeError as error:
            return str(error)

    assert run_lockstep(2, body) == [[1, 30], "on one rank"]


def test_a_signal_within_the_last_step(model: Any) -> None:
    """No message follows that could tell the others; it must not be lost."""

    def body(context: lp.ParallelContext) -> list[Any]:
        engine = lp.Engine(lp.LookaheadDecoder(model, FIXED, context))

        def on_tokens(tokens: list[int], step: int) -> None:
            if context.rank == 1 and len(handle.tokens) == 40:
                engine._signals.received = signal.SIGTERM  # as its handler does

        handle = engine.submit(IDS, 40, _sampling(1), on_tokens=on_tokens, eos_token_id=())
        ended = "False"
        try:
            while engine.step():
                pass
        except KeyboardInterrupt as error:
            ended = type(error).__name__
        return [ended, handle.result().finish_reason, handle.result().tokens]

    tokens = _alone(model, IDS, 40, 1)
    assert run_lockstep(2, body) == [["False", "length", tokens], ["Terminated", "length", tokens]]


@pytest.mark.parametrize("last", [False, True])
def test_a_signal_behind_a_header_ends_texts_on_all_ranks(model: Any, last: bool) -> None:
    """A rank that raised before a message told the others left them waiting for its next step."""

    def body(context: lp.ParallelContext) -> tuple[str, list[int], list[str]]:
        engine = lp.Engine(lp.LookaheadDecoder(model, FIXED, context), max_sequences=1)

        def on_tokens(tokens: list[int], step: int) -> None:
            if context.rank == 1 and (len(handle.tokens) == 40 if last else step == 2):
                engine._signals.received = signal.SIGTERM  # as its handler does

        handle = engine.submit(IDS, 40, _sampling(1), on_tokens=on_tokens, eos_token_id=())
        waits = engine.submit(IDS[:5], 9, _sampling(2))
        log, left = [], True
        while left:
            try:
                left = engine.step()
                log.append("step")
            except KeyboardInterrupt as error:
                log.append(type(error).__name__)
                break
        while engine.step():
            pass
        assert waits.result().finish_reason == ("interrupted" if last else "length"), "it ran when others were told"
        assert waits.result().tokens == ([] if last else _alone(model, IDS[:5], 9, 2))
        return handle.result().finish_reason, handle.result().tokens, log

    (reason, tokens, log), other = run_lockstep(2, body)
    assert other == (reason, tokens, log)
    assert reason == ("length" if last else "interrupted")
    assert log.pop() == "Terminated" and set(log) == {"step"}
    assert tokens == _alone(model, IDS, 40, 1)[: len(tokens)]


def test_engines_with_other_settings_are_refused(model: Any) -> None:
    """Ranks that admit other texts would wait for each other for ever."""

    def body(context: lp.ParallelContext) -> str:
        decoder = lp.LookaheadDecoder(model, FIXED, context)
        with pytest.raises(ValueError, match="the max_sequences of rank 1 differs from rank 0's"):
            lp.Engine(decoder, max_sequences=2 + context.rank)
        return "refused"

    assert run_lockstep(2, body) == ["refused"] * 2


class _NaN(LogitsProcessor):
    """What it gives is NaN from some length on."""

    per_branch = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * float("nan") if input_ids.shape[1] > 22 else scores


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_logits_that_are_not_finite_fail_one_text_on_all_ranks(arch: str) -> None:
    """All ranks are sent the same, so that none waits for another: the other texts go on."""
    model = tiny_model(arch, seed=1)
    expected = lp.LookaheadDecoder(model, FIXED).generate(IDS, 9).tokens

    def body(context: lp.ParallelContext) -> tuple[list[int], str, int]:
        engine = lp.Engine(lp.LookaheadDecoder(model, FIXED, context))
        handles = [engine.submit(IDS, 9), engine.submit(IDS, 9, logits_processor=[_NaN()])]
        engine.run()
        engine.pool.check()
        return handles[0].result().tokens, str(handles[1].error), engine.pool.free

    one, other = run_lockstep(2, body)
    assert one == other
    assert one[0] == expected and "NaN or infinite" in one[1]
