"""Plain steps of the adaptive budget, on one rank and several: the loop around them is the same."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

import lp
from lp.budget.backoff import LONGEST_BACK_OFF
from lp.budget.step_times import StepTimes
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import BOUNDARY, VOCABULARY, drawn_text, tiny_model

ADAPTIVE = lp.LookaheadConfig(adaptive=True)
STEP_TIMES = StepTimes.constant(0.01, 120)
HIGH = lp.SamplingParams(temperature=2.0, seed=1)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_failing_callback_stops_every_rank(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that only rank 0 can report leaves the others going on, or waiting."""
    monkeypatch.setattr("lp.parallel.context.DEFAULT_TIMEOUT_S", 20)
    model, ids, failing = tiny_model(), drawn_text(random.Random(5), 30), 20
    plain = lp.AutoregressiveDecoder(model).generate(ids, LONGEST_BACK_OFF, HIGH, eos_token_id=()).tokens

    def body(context: ParallelContext) -> lp.GenerationOutput | BaseException:
        def on_tokens(tokens: list[int], step: int) -> None:
            if context.rank == bad and step == failing:
                raise ZeroDivisionError("from the callback")

        decoder = lp.LookaheadDecoder(model, ADAPTIVE, context, step_times=STEP_TIMES)
        try:
            return decoder.generate(ids, LONGEST_BACK_OFF, HIGH, eos_token_id=(), on_tokens=on_tokens)
        except (ZeroDivisionError, lp.Interrupted) as error:
            return error

    for rank, output in enumerate(run_lockstep(3, body)):
        if rank == bad:
            assert isinstance(output, ZeroDivisionError)
        else:
            assert isinstance(output, lp.Interrupted)
            assert output.output.tokens == plain[: failing + 1] and all(step.idle for step in output.output.step_stats)


def test_a_rank_with_other_step_times_is_named() -> None:
    """It would choose other trees, and be named only once they differ."""
    model = tiny_model()

    def body(context: ParallelContext) -> None:
        step_times = StepTimes.constant(0.02 if context.rank == 1 else 0.01, 120)
        lp.LookaheadDecoder(model, ADAPTIVE, context, step_times=step_times).generate([1, 2, 3], 8)

    with pytest.raises(ValueError, match="the step time table of rank 1 differs from rank 0's"):
        run_lockstep(3, body)


@pytest.mark.parametrize("arch", ["llama_dynamic", "llama_longrope", "phi3_longrope"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plain_step_past_the_rotary_boundary(arch: str, ranks: int) -> None:
    """The first one there changes what is cached, as any other step does."""
    ids = [(7 * i + 3) % VOCABULARY for i in range(BOUNDARY - 12)]
    model = tiny_model(arch, sharpness=30.0)  # or noise would hide what the boundary changes
    plain = lp.AutoregressiveDecoder(copy.deepcopy(model)).generate(ids, 40, HIGH, eos_token_id=()).tokens

    def body(context: ParallelContext) -> lp.GenerationOutput:
        decoder = lp.LookaheadDecoder(copy.deepcopy(model), ADAPTIVE, context, step_times=STEP_TIMES)
        return decoder.generate(ids, 40, HIGH, eos_token_id=())

    for output in run_lockstep(ranks, body):
        assert output.tokens == plain and all(step.idle for step in output.step_stats)


@pytest.mark.parametrize(
    ("outer", "inner"), [("flash", "eager"), ("flash", "sdpa"), ("sdpa", "flash"), ("eager", "sdpa")]
)
def test_a_text_within_a_text_of_another_backend(outer: str, inner: str) -> None:
    """The attention of a model is one for all its decoders: the last to have set it would steer the others' steps."""
    model = tiny_model()
    ids = drawn_text(random.Random(1), 30)
    inner_tokens: list[list[int]] = []
    shape = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4)
    decoders: dict[str, Any] = {name: lp.LookaheadDecoder(model, shape, attention=name) for name in (inner, outer)}

    def on_tokens(tokens: list[int], step: int) -> None:
        if step == 3:
            inner_tokens.append(decoders[inner].generate(ids[:9], 12).tokens)

    plain = lp.AutoregressiveDecoder(tiny_model())
    assert decoders[outer].generate(ids, 40, on_tokens=on_tokens).tokens == plain.generate(ids, 40).tokens
    assert inner_tokens == [plain.generate(ids[:9], 12).tokens]
