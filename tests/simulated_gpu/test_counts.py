"""How often a captured step waits for the GPU, launches, and copies from memory that is not pinned.

`python -m tests.support.simulated_cuda.counts` prints the figures, and the lines of lp/ that they come from.
"""

from __future__ import annotations

from typing import Any

import pytest

from lp.models.captured_step import CapturedStep
from lp.models.captured_steps import CapturedSteps
from tests.support.simulated_cuda import SimulatedCuda
from tests.support.simulated_cuda.counts import SAMPLING, captured_decoder, most, row, steps_of

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
