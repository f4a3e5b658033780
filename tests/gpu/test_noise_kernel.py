"""The noise kernel as it is compiled, against torch's noise on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lp.sampling.noise import gumbel, gumbel_rows
from tests.conftest import GPU_DRY_RUN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU_DRY_RUN, reason="a compiled kernel needs a GPU; tests/unit interprets it"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_torchs_noise(dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    """A device's logarithm, or its products of 64 bits, may differ where the interpreter's are numpy's."""
    pytest.importorskip("triton", reason="the noise kernel needs Triton")
    from tests.noise_kernel_cases import largest_is_finite, same_bits, worst_error

    record_property("part", "noise")
    record_property("dtype", str(dtype).removeprefix("torch."))
    device = torch.device("cuda")
    assert same_bits(device) and largest_is_finite(device)
    error = worst_error(dtype, device)
    record_property("error", error)
    record_property("tolerance", 2)
    assert error <= 2


def test_the_operation_fills_rows_on_the_device() -> None:
    """With Triton or without."""
    rows = torch.zeros(4, 1000, device="cuda")
    key = 0x1234567
    gumbel_rows(rows, key, 6, 3)
    assert not rows[1].any() and rows[[2, 3, 0]].all()
    on_cpu = torch.zeros(4, 1000)
    gumbel_rows(on_cpu, key, 6, 3)
    assert torch.allclose(rows.cpu(), on_cpu, rtol=1e-6, atol=1e-6)
    assert gumbel(3, 0, 5, 1000, torch.device("cuda")).shape == (1000,)
