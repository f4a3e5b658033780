"""Steps that the adaptive budget leaves plain, on one rank and several: the loop around them is the same."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

import lp
from lp.budget.policy import LONGEST_NAP
from lp.budget.step_times import flat
from lp.parallel.context import ParallelContext
from lp.parallel.lockstep import run_lockstep
from tests.tiny_models import BOUNDARY, VOCABULARY, drawn_text, tiny_model

ADAPTIVE, CURVE = lp.LookaheadConfig(adaptive=True), flat(0.01, 120)
HOT = lp.SamplingParams(temperature=2.0, seed=1)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_failing_callback_stops_every_rank(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that only rank 0 is heard to say leaves the others going on, or waiting."""
    monkeypatch.setattr("lp.parallel.context.DEFAULT_TIMEOUT_S", 20)
    model, ids, failing = tiny_model(), drawn_text(random.Random(5), 30), 20
    plain = lp.AutoregressiveDecoder(model).generate(ids, LONGEST_NAP, HOT, eos_token_id=()).tokens

    def body(context: ParallelContext) -> lp.GenerationOutput | BaseException:
        def on_tokens(tokens: list[int], step: int) -> None:
            if context.rank == bad and step == failing:
                raise ZeroDivisionError("from the callback")

        decoder = lp.LookaheadDecoder(model, ADAPTIVE, context, curve=CURVE)
        try:
            return decoder.generate(ids, LONGEST_NAP, HOT, eos_token_id=(), on_tokens=on_tokens)
        except (ZeroDivisionError, lp.Interrupted) as error:
            return error

    for rank, output in enumerate(run_lockstep(3, body)):
        if rank == bad:
            assert isinstance(output, ZeroDivisionError)
        else:
            assert isinstance(output, lp.Interrupted)
            assert output.output.tokens == plain[: failing + 1] and all(step.idle for step in output.output.step_stats)


def test_a_rank_with_another_curve_is_named() -> None:
    """It would choose other rows, and say so only once they differ."""
    model = tiny_model()

    def body(context: ParallelContext) -> None:
        curve = flat(0.02 if context.rank == 1 else 0.01, 120)
        lp.LookaheadDecoder(model, ADAPTIVE, context, curve=curve).generate([1, 2, 3], 8)

    with pytest.raises(ValueError, match="the step curve of rank 1 differs from rank 0's"):
        run_lockstep(3, body)


@pytest.mark.parametrize("arch", ["llama_dynamic", "llama_longrope", "phi3_longrope"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plain_step_past_the_rotary_boundary(arch: str, ranks: int) -> None:
    """The first one there changes what is cached, as any other step does."""
    ids = [(7 * i + 3) % VOCABULARY for i in range(BOUNDARY - 12)]
    model = tiny_model(arch, sharpness=30.0)  # or noise would hide what the boundary changes
    plain = lp.AutoregressiveDecoder(copy.deepcopy(model)).generate(ids, 40, HOT, eos_token_id=()).tokens

    def body(context: ParallelContext) -> lp.GenerationOutput:
        decoder = lp.LookaheadDecoder(copy.deepcopy(model), ADAPTIVE, context, curve=CURVE)
        return decoder.generate(ids, 40, HOT, eos_token_id=())

    for output in run_lockstep(ranks, body):
        assert output.tokens == plain and all(step.idle for step in output.step_stats)


@pytest.mark.parametrize(
    ("outer", "inner"), [("flash", "eager"), ("flash", "sdpa"), ("sdpa", "flash"), ("eager", "sdpa")]
)
def test_a_text_within_a_text_of_another_backend(outer: str, inner: str) -> None:
    """The attention of a model is one for all its decoders: the last to have set it would steer the others' steps."""
    model, ids, said = tiny_model(), drawn_text(random.Random(1), 30), list[list[int]]()
    shape = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4)
    decoders: dict[str, Any] = {name: lp.LookaheadDecoder(model, shape, attention=name) for name in (inner, outer)}

    def on_tokens(tokens: list[int], step: int) -> None:
        if step == 3:
            said.append(decoders[inner].generate(ids[:9], 12).tokens)

    plain = lp.AutoregressiveDecoder(tiny_model())
    assert decoders[outer].generate(ids, 40, on_tokens=on_tokens).tokens == plain.generate(ids, 40).tokens
    assert said == [plain.generate(ids[:9], 12).tokens]
