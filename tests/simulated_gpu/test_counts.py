"""How often a captured step waits for the GPU, launches, and copies from memory that is not pinned.

`python -m tests.support.simulated_cuda.counts` prints the figures, and the lines of lp/ that they come from.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lp
from lp.models import captured_steps
from lp.models.captured_step import BlockShape, CapturedStep
from lp.models.captured_steps import CapturedSteps
from lp.models.graph_recorder import CaptureFailed
from lp.models.kv_cache import StaticKVCache
from tests.support.simulated_cuda import SimulatedCuda
from tests.support.simulated_cuda.counts import SAMPLING, captured_decoder, most, row, steps_of
from tests.support.simulated_cuda.events import LAUNCH, Events

# Of one step: synchronisations, launches (graphs included), copies from pageable memory.
LIMITS = dict.fromkeys(SAMPLING, (1, 2, 0))


@pytest.mark.subset(3)
@pytest.mark.parametrize("how", LIMITS)
def test_what_a_captured_step_asks_for(how: str, gpu: SimulatedCuda) -> None:
    """Each wait costs a GPU the overlap of its step with the host, and no test of tokens sees one."""
    steps = steps_of(gpu, captured_decoder(), SAMPLING[how])
    found = most(steps)
    print(row(how, found))
    assert len(steps) >= 3
    worst = max(steps, key=lambda step: step.total())
    within = all(figure <= limit for figure, limit in zip(found, LIMITS[how], strict=True))
    assert within, f"{row(how, found)}\n{row('limit', LIMITS[how])}\n{worst.table()}"


def test_a_pageable_copy_in_every_step_is_found(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the inputs of a step lie in memory that is not pinned, which gives the same tokens, later."""
    staged = CapturedSteps.staged

    def copying(self: CapturedSteps, *args: Any) -> CapturedStep:
        step = staged(self, *args)
        step.host.clone().to("cuda", non_blocking=True)
        return step

    monkeypatch.setattr(CapturedSteps, "staged", copying)
    steps = steps_of(gpu, captured_decoder(), None)
    assert most(steps)[2] == 1


def until_the_first_token(gpu: SimulatedCuda, decoder: lp.LookaheadDecoder, ids: list[int]) -> Events:
    """What a text asks of the GPU before its first tokens are there."""
    before, seen = Events(gpu.events), list[Events]()
    decoder.generate(ids, 6, eos_token_id=(), on_tokens=lambda *_: seen.append(Events(gpu.events - before)))
    return seen[0]


def test_a_text_replays_nothing_but_its_own_steps(gpu: SimulatedCuda) -> None:
    """On an H200 every text began by running the steps of all sizes, of which it needed none: 13 steps' time."""
    decoder = captured_decoder()
    found = [until_the_first_token(gpu, decoder, [*range(3, 33)]) for _ in range(2)]
    replays = [sum(count for (_, what, _), count in events.items() if what == "graph") for events in found]
    assert replays[0] > 2 and replays[1] == 2, "its first step, and that one's tail"


def test_prompts_that_come_often_are_captured(gpu: SimulatedCuda) -> None:
    """A host launches a pass one kernel after the other in ten times the time that the pass takes."""
    decoder = captured_decoder()
    alone = lp.AutoregressiveDecoder(decoder.model)
    launches = []
    for first in range(captured_steps.UNCAPTURED + 3):  # other prompts, of like lengths
        ids = [token % 61 for token in range(first, first + 90 + first % 3)]
        launches.append(until_the_first_token(gpu, decoder, ids).total(LAUNCH))
        assert decoder.generate(ids, 6, eos_token_id=()).tokens == alone.generate(ids, 6, eos_token_id=()).tokens
    assert min(launches[:4]) > 60 and launches[-1] < 20, launches


@pytest.mark.parametrize("error", [CaptureFailed, torch.OutOfMemoryError])
def test_a_prompt_that_cannot_be_captured(
    error: type[Exception], gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no captured step: neither the text nor the captured steps of all others may be lost by it."""
    decoder = captured_decoder()
    alone = lp.AutoregressiveDecoder(decoder.model)
    capture = CapturedSteps.capture

    def full(self: CapturedSteps, cache: StaticKVCache, shape: BlockShape) -> CapturedStep:
        if shape.bucket > 64:
            raise error("no room")
        return capture(self, cache, shape)

    monkeypatch.setattr(CapturedSteps, "capture", full)
    monkeypatch.setattr(captured_steps, "UNCAPTURED", 0)
    ids = [token % 61 for token in range(90)]
    for _ in range(2):
        assert decoder.generate(ids, 6, eos_token_id=()).tokens == alone.generate(ids, 6, eos_token_id=()).tokens
    captured = decoder.runner.captured
    assert captured is not None and captured._prompts_given_up
