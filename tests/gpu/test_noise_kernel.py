"""The noise kernel as it is compiled, against torch's noise on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lp.sampling.noise import fill_noise, gumbel, position_key
from tests.conftest import GPU_DRY_RUN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU_DRY_RUN, reason="a compiled kernel needs a GPU; an interpreter has its test"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_torchs_noise(dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    """A device's logarithm, or its products of 64 bits, may differ where the interpreter's are numpy's."""
    pytest.importorskip("triton", reason="the noise kernel needs Triton")
    from tests.support.noise_kernel_cases import largest_is_finite, same_bits, worst_error

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
    rows, keys = torch.tensor([2, -1, 0]), torch.tensor([position_key(7, 0, position) for position in (6, 7, 8)])
    found, on_cpu = torch.zeros(4, 1000, device="cuda"), torch.zeros(4, 1000)
    fill_noise(found, rows.cuda(), keys.cuda())
    assert not found[1].any() and found[[2, 0]].all()
    fill_noise(on_cpu, rows, keys)
    assert torch.allclose(found[:3].cpu(), on_cpu[:3], rtol=1e-6, atol=1e-6)
    assert gumbel(3, 0, 5, 1000, torch.device("cuda")).shape == (1000,)
