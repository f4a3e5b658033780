"""How often a captured step waits for the GPU, launches, and copies from memory that is not pinned: no more than today.

`python -m tests.simulated_cuda.counts` prints the figures, and the lines of lp/ that they come from.
"""

from __future__ import annotations

import pytest

from lp.models.captured_steps import CapturedSteps
from tests.simulated_cuda import PAGEABLE, SimulatedCuda
from tests.simulated_cuda.counts import SAMPLING, captured_decoder, most, row, steps_of

# Of one step of a model of two layers: synchronisations, launches outside the graph's own, copies from pageable memory.
LIMITS = {
    "greedy": (4, 31, 2),
    "coupled": (7, 115, 5),
    "top-k": (7, 158, 5),
    "top-p": (7, 122, 5),
    "repetition penalty": (13, 162, 11),
}


@pytest.mark.parametrize("how", LIMITS)
def test_a_captured_step_asks_no_more_than_today(how: str, gpu: SimulatedCuda) -> None:
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
    before = most(steps_of(gpu, captured_decoder(), None))
    pinned = CapturedSteps._staging_buffers
    monkeypatch.setattr(CapturedSteps, "_staging_buffers", lambda *asked: [x.clone() for x in pinned(*asked)])
    steps = steps_of(gpu, captured_decoder(), None)
    assert most(steps)[2] == before[2] + 2
    copies = {line for kind, _, line in steps[0] if kind == PAGEABLE}
    assert any(line.startswith("lp/models/captured_steps.py:") for line in copies), copies
