"""lp.models.compile_options: steps of the same lines are compiled apart, in every release of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from lp.models.compile_options import compiled_by_itself


def _step(size: int) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        return torch.zeros(size) + size

    return forward


def test_every_step_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would take one for a change of another, compile it again, and stop after 8 times."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # dynamo's part alone
    with torch._dynamo.config.patch(error_on_recompile=True):
        steps = [compiled_by_itself(_step(size)) for size in range(1, 12)]
        for _ in range(2):
            for size, step in enumerate(steps, 1):
                assert step().tolist() == [size] * size
