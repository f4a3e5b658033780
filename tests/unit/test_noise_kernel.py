"""The noise kernel in Triton's interpreter against torch's noise, and compiled for GPUs that are not there."""

from __future__ import annotations

import json
import sys

import pytest

from tests.compiled_kernels import SHARED_KB, compiled
from tests.conftest import Processes

pytest.importorskip("triton", reason="the noise kernel needs Triton")


def test_it_is_torchs_noise(processes: Processes) -> None:
    """Other bits on a GPU would be another text there than on a CPU; infinite noise would win over any logit."""
    ran = processes.run(
        [sys.executable, "-W", "ignore", "-m", "tests.noise_kernel_cases"], {"TRITON_INTERPRET": "1"}, timeout_s=300
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["same_bits"] and found["largest_is_finite"]
    assert found["torch.float32"] <= 2 and found["torch.float64"] <= 2


@pytest.mark.parametrize("capability", SHARED_KB)
def test_it_compiles(capability: int) -> None:
    from lp.sampling.noise_kernel import BLOCK, _gumbel_rows_kernel

    types = {"noise_base": "*fp32", "key": "i64", "first_position": "i64"}
    kernel = compiled(_gumbel_rows_kernel, {"BLOCK": BLOCK}, types, "fp32", capability, {})
    assert ".f64" in kernel.asm["ptx"], "the logarithms of doubles"
