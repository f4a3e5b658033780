"""The thread that runs an engine, as others watch it: a turn that does not come, and an end from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import lp
from launch.serve.engine_loop import Closing, Ending, EngineLoop, LiveText, Scoring
from launch.serve.prompt_logprobs import CHUNK, prompt_logprobs


class Stub:
    """An engine that takes nothing, whose step waits while it is held."""

    def __init__(self) -> None:
        self.decoder = SimpleNamespace(context=lp.ParallelContext())
        self.max_sequences = 1
        self.goes_on = threading.Event()
        self.goes_on.set()

    def submit(self, **arguments: Any) -> Any:
        return SimpleNamespace(done=False)

    def step(self) -> bool:
        time.sleep(0.001)
        self.goes_on.wait(10)
        return True


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    engine: Any = Stub()
    made = EngineLoop(engine, None, 1)  # type: ignore[arg-type]
    made.start()
    yield made
    engine.goes_on.set()
    made.fail(RuntimeError("the test has ended"))
    assert made.close(10)


def takes_a_turn(loop: EngineLoop) -> bool:
    """Whether a turn that was asked for comes before long."""
    loop.silent_s()
    end = time.monotonic() + 5
    while (late := loop.silent_s() > 0) and time.monotonic() < end:
        time.sleep(0.01)
    return not late


def test_a_loop_that_hangs_is_silent(loop: EngineLoop) -> None:
    """Health checks see it, and not only requests that wait for ever; a loop that works has nothing to say."""
    engine: Any = loop.engine
    assert takes_a_turn(loop)
    engine.goes_on.clear()
    time.sleep(0.05)
    loop.silent_s()
    time.sleep(0.2)
    first = loop.silent_s()
    assert first > 0.1 and loop.silent_s() >= first
    engine.goes_on.set()
    assert takes_a_turn(loop)


def test_a_failure_from_outside_ends_texts_once(loop: EngineLoop) -> None:
    """As where another process has ended: clients are told at once, by one error, and nothing new is taken."""
    events: list[Any] = []
    spec: Any = SimpleNamespace(as_data=dict, arguments=lambda grammars: {}, logprobs=None, resumed=[])
    loop.submit([LiveText(spec, None, events.append)])
    lost = RuntimeError("rank 1 has ended")
    loop.fail(lost)
    loop.fail(RuntimeError("what came of it"))
    assert events == [Ending(error=lost)] and loop.failure is lost
    with pytest.raises(Closing):
        loop.submit([LiveText(spec)])


def test_a_failure_ends_the_prompt_that_is_scored(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client would wait for an engine that hangs in it; and what comes of it later is not told as well."""
    begun, let_go = threading.Event(), threading.Event()

    def hangs(*_: Any) -> list[Any]:
        begun.set()
        let_go.wait(10)
        return []

    monkeypatch.setattr("launch.serve.engine_loop.prompt_logprobs", hangs)
    told: list[Any] = []
    loop.score(Scoring([5], 0, told.append))
    assert begun.wait(10)
    lost = RuntimeError("rank 1 has ended")
    loop.fail(lost)
    assert told == [lost]
    let_go.set()
    assert loop.close(10) and told == [lost]


def test_a_long_prompt_that_is_scored_is_no_silence(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A health check would end a server that computes."""
    passed, goes_on, seen = threading.Event(), threading.Event(), []

    def scored(decoder: Any, prompt: list[int], num_top: int, on_pass: Any) -> list[Any]:
        loop.silent_s()  # asked amid the first pass
        on_pass()
        seen.append(loop.silent_s())
        passed.set()
        goes_on.wait(10)
        return []

    monkeypatch.setattr("launch.serve.engine_loop.prompt_logprobs", scored)
    loop.score(Scoring([5], 0, lambda _: None))
    assert passed.wait(10) and seen == [0]
    time.sleep(0.05)
    assert loop.silent_s() > 0.04, "what hangs in a pass is silent"
    goes_on.set()
    assert takes_a_turn(loop)


def test_every_pass_over_a_prompt_is_told() -> None:
    """As `silent_s` is answered by them."""
    passes: list[None] = []
    found = prompt_logprobs(lp.PlainDecoder(lp.load("demo").model), [5] * (2 * CHUNK), 0, lambda: passes.append(None))
    assert len(found) == 2 * CHUNK - 1 and len(passes) == 2
