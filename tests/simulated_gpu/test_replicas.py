"""One replica over two simulated GPUs: what its ranks send lies on their GPU, and a step waits once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lp
from lp.models import captured_steps, fused
from lp.models.captured_step import BlockShape, CapturedStep
from lp.models.captured_steps import CapturedSteps
from lp.models.graph_recorder import GraphRecorder
from lp.models.kv_cache import StaticKVCache
from lp.models.tensor_parallel import divide
from lp.parallel.context import ParallelContext
from tests.support.simulated_cuda.counts import CONFIG, NEW, SAMPLING
from tests.support.simulated_cuda.events import KINDS, Events
from tests.support.simulated_cuda.install import simulated_cuda
from tests.support.simulated_cuda.ranks import run_on_gpus
from tests.support.simulated_cuda.simulation import SimulatedCuda
from tests.support.tiny_models import tiny_model

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


@pytest.fixture
def gpu() -> Iterator[SimulatedCuda]:
    with simulated_cuda() as simulated:
        yield simulated


@pytest.mark.subset(2)
@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize("sampling", ["greedy", "coupled", "top-k", "top-p"])
def test_one_wait_a_step_and_no_host_tensor(
    sampling: str, capture: str, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses host tensors, and a wait for the replica beside that for the message would be felt in each step."""
    # Simulated parameters are of no class that weights may be moved of; where they lie matters to no token.
    monkeypatch.setattr(fused, "is_mergeable", lambda linears: True)
    monkeypatch.setattr(fused, "laid_out", lambda parameters: [each.data for each in parameters])
    model = tiny_model(sharpness=2.0)
    params = SAMPLING[sampling]
    expected = lp.AutoregressiveDecoder(model).generate(IDS, NEW, params).tokens
    wholes = [copy.deepcopy(model).to(f"cuda:{rank}") for rank in range(2)]

    def body(context: ParallelContext, own: SimulatedCuda) -> tuple[list[int], list[Events]]:
        part = divide(wholes[context.rank], context.replica)
        decoder = lp.LookaheadDecoder(part, CONFIG, context, capture=capture)
        assert decoder.runner.fused and (decoder.runner.captured is not None) == (capture == "graph")
        decoder.generate(IDS, NEW, params)
        seen: list[Events] = []
        output = decoder.generate(IDS, NEW, params, on_tokens=lambda tokens, step: seen.append(Events(own.events)))
        return output.tokens, [Events(after - before) for before, after in itertools.pairwise(seen)]

    for tokens, steps in run_on_gpus(2, body, tp=True):
        assert tokens == expected
        waits = KINDS[0]
        assert max(step.total(waits) for step in steps) == 1, [dict(step) for step in steps]
        if capture == "graph":  # forward pass, sampling and message; sometimes the noise of new positions
            assert {("launch", "graph")} <= {key[:2] for key in steps[-1]}
            assert max(step.total("launch") for step in steps) <= 2 + 4 * (sampling != "greedy"), [*map(dict, steps)]


@pytest.mark.subset(2)
@pytest.mark.parametrize("failing", ["one text", "tail", "several texts"])
def test_no_rank_captures_what_another_cannot(
    failing: str, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step is padded, an uncaptured one is not: NCCL hangs in sums of different sizes."""
    monkeypatch.setattr(captured_steps, "UNCAPTURED", 0)
    record, capture = GraphRecorder._recorded, CapturedSteps.capture
    steps_of: dict[int, str] = {}  # by GPU, what kind of step it captures

    def recorded(self: GraphRecorder, work: Callable[[], Any]) -> Callable[[], Any]:
        run = record(self, work)
        kind = "tail" if "CapturedTail" in work.__qualname__ else steps_of[self.device.index]
        if self.device.index == 1 and failing == kind:
            raise RuntimeError("not on this GPU")
        return run

    def captured(self: CapturedSteps, cache: StaticKVCache, shape: BlockShape) -> CapturedStep:
        steps_of[self.device.index] = "several texts" if shape.places else "one text"
        return capture(self, cache, shape)

    monkeypatch.setattr(GraphRecorder, "_recorded", recorded)
    monkeypatch.setattr(CapturedSteps, "capture", captured)
    model = tiny_model(sharpness=2.0)
    texts = [IDS, IDS[3:], IDS[5:9]]
    alone = lp.AutoregressiveDecoder(model)
    expected = [alone.generate(ids, NEW, eos_token_id=()).tokens for ids in texts]
    wholes = [copy.deepcopy(model).to(f"cuda:{rank}") for rank in range(2)]

    def body(context: ParallelContext, own: SimulatedCuda) -> list[list[int]]:
        part = divide(wholes[context.rank], context.replica)
        engine = lp.Engine(lp.LookaheadDecoder(part, CONFIG, context), cache_tokens=1024)
        handles = [engine.submit(texts[0], NEW, eos_token_id=())]
        engine.step()
        engine.step()  # by itself
        handles += [engine.submit(ids, NEW, eos_token_id=()) for ids in texts[1:]]
        engine.run()
        assert bool(engine._core._shared._steps) == (failing == "tail")
        return [handle.result().tokens for handle in handles]

    assert run_on_gpus(2, body, tp=True) == [expected, expected]
