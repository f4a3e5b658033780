"""A layer's kernels as they are compiled, against torch's operations on the same device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lp.config import Capture
from lp.models.runner import runner_of
from tests.conftest import GPU_DRY_RUN
from tests.gpu.parity import model_of

pytest.importorskip("triton", reason="a layer's kernels need Triton")
from tests.support.layer_kernel_cases import CASES, DTYPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU_DRY_RUN, reason="a compiled kernel needs a GPU; an interpreter has its test"),
]
TOLERANCE = 4.0  # eps; an H100 gave 0 in bfloat16, 0.1 in float16, and 2.9 in float32, where sums have another order


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs_operation(name: str, dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    """Layouts of threads and memory are not interpreted."""
    record_property("part", "layer kernels")
    record_property("dtype", str(dtype).removeprefix("torch."))
    error = CASES[name](torch.device("cuda"), dtype)
    record_property("error", error)
    record_property("tolerance", TOLERANCE)
    assert error <= TOLERANCE


def test_captured_steps_take_them() -> None:
    """A trial that refuses a right kernel, or finds every one slow, would be seen by nothing else."""
    model = model_of("GQA", 64, torch.bfloat16, layers=2)
    captured = runner_of(model, capture=Capture.GRAPH).captured
    assert captured is not None
    assert captured.kernels.rotate_and_store is not None and captured.kernels.move_slots is not None
