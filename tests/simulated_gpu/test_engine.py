"""The engine on a simulated GPU: a text by itself takes captured steps, and goes on when others come."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest

import lp
from tests.support.simulated_cuda.counts import CONFIG, NEW, SAMPLING
from tests.support.simulated_cuda.events import Events
from tests.support.simulated_cuda.simulation import SimulatedCuda
from tests.support.tiny_models import drawn_text, tiny_model

RNG = random.Random("engine")
IDS, OTHER = drawn_text(RNG, 30), drawn_text(RNG, 12)


def engine_of(model: Any) -> lp.Engine:
    decoder = lp.LookaheadDecoder(copy.deepcopy(model).to("cuda"), CONFIG, capture="graph")
    return lp.Engine(decoder, cache_tokens=1024)


def expected(model: Any, ids: list[int], sampling: lp.SamplingParams | None) -> list[int]:
    return lp.AutoregressiveDecoder(model).generate(ids, NEW, sampling, eos_token_id=()).tokens


def graphs(step: Events) -> int:
    return sum(count for (_, what, _), count in step.items() if what == "graph")


def reserved(engine: lp.Engine) -> bool:
    captured = engine.decoder.runner.captured
    assert captured is not None
    return captured.reserved


@pytest.mark.parametrize("sampling", ["greedy", "top-p"])
def test_a_text_by_itself_takes_captured_steps(sampling: str, gpu: SimulatedCuda) -> None:
    """A server's only stream would launch every kernel by itself; a later text begins with what it left in the pool."""
    model, params = tiny_model(), SAMPLING[sampling]
    engine = engine_of(model)
    for ids in (IDS, [*IDS, 3, 4]):
        seen: list[Events] = []

        def note(*_: object, seen: list[Events] = seen) -> None:
            seen.append(Events(gpu.events))

        handle = engine.submit(ids, NEW, params, eos_token_id=(), on_tokens=note)
        engine.run()
        assert handle.result().tokens == expected(model, ids, params)
        assert bool(handle.reused) == (ids is not IDS)
        steps = [Events(after - before) for before, after in itertools.pairwise(seen[1:])]
        assert steps and {graphs(step) for step in steps} == {2}, "the forward pass, and sampling with the message"
        assert not reserved(engine)
        engine.pool.check()


def test_texts_that_come_and_go_beside_it(gpu: SimulatedCuda) -> None:
    """Its cache is not in the pool, and what a captured step left to be moved must not be lost."""
    model = tiny_model()
    engine = engine_of(model)
    first = engine.submit(IDS, NEW, eos_token_id=())
    for _ in range(4):
        engine.step()
    assert reserved(engine)
    second = engine.submit(OTHER, 6, SAMPLING["coupled"], eos_token_id=())
    third = engine.submit([*IDS, 5], NEW, eos_token_id=())  # begins with what the first one has
    engine.run()
    assert first.result().tokens == expected(model, IDS, None)
    assert second.result().tokens == expected(model, OTHER, SAMPLING["coupled"])[:6]
    assert third.result().tokens == expected(model, [*IDS, 5], None) and third.reused >= len(IDS) - 1
    assert not reserved(engine)
    engine.pool.check()


@pytest.mark.parametrize("used", [False, True])
def test_steps_that_are_captured_behind_a_reused_prefix(used: bool, gpu: SimulatedCuda) -> None:
    """Steps are run when they, or their tails, are captured: none may write into the prefix, as if it were empty."""
    model = tiny_model()
    decoder = lp.LookaheadDecoder(copy.deepcopy(model).to("cuda"), CONFIG, capture="graph")
    engine = lp.Engine(decoder, cache_tokens=1024)
    together = [engine.submit(ids, NEW, eos_token_id=()) for ids in (IDS, OTHER)]
    engine.run()
    if used:
        decoder.generate(OTHER[:3], 3, eos_token_id=())  # of the sizes that it needs
    for sampling in (SAMPLING["coupled"], SAMPLING["top-p"]):  # whose tails are others
        handle = engine.submit([*IDS, 5], NEW, sampling, eos_token_id=())
        engine.run()
        assert handle.reused == len(IDS)
        assert handle.result().tokens == expected(model, [*IDS, 5], sampling)
    assert [handle.result().tokens for handle in together] == [expected(model, ids, None) for ids in (IDS, OTHER)]


def test_a_text_that_fails_gives_the_cache_back(gpu: SimulatedCuda) -> None:
    """Else no later text would take captured steps."""
    model = tiny_model()
    engine = engine_of(model)

    def fail(tokens: list[int], step: int) -> None:
        raise RuntimeError("the caller's")

    handle = engine.submit(IDS, NEW, on_tokens=fail)
    engine.run()
    with pytest.raises(RuntimeError, match="the caller's"):
        handle.result()
    cancelled = engine.submit(IDS, NEW)
    engine.step()
    assert reserved(engine)
    engine.cancel(cancelled)
    assert not reserved(engine)
    engine.pool.check()
