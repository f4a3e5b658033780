"""The noise kernel in Triton's interpreter against torch's noise, and compiled for GPUs that are not there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from lp.sampling import noise
from tests.support.compiled_kernels import SHARED_KB, compiled
from tests.support.interpreted_kernels import interpreted

pytest.importorskip("triton", reason="the noise kernel needs Triton")


def test_it_is_torchs_noise() -> None:
    """Other bits on a GPU would be another text there than on a CPU; infinite noise would win over any logit."""
    found = interpreted("tests.support.noise_kernel_cases")
    assert found["same_bits"] and found["largest_is_finite"]
    assert found["torch.float32"] <= 2 and found["torch.float64"] <= 2


@pytest.mark.parametrize("capability", SHARED_KB)
def test_it_compiles(capability: int) -> None:
    from lp.sampling.noise_kernel import BLOCK, _fill_noise_kernel

    types = {"noise_base": "*fp32", "rows_base": "*i64", "keys_base": "*i64"}
    kernel = compiled(_fill_noise_kernel, {"BLOCK": BLOCK}, types, "fp32", capability, {})
    assert ".f64" in kernel.asm["ptx"], "the logarithms of doubles"


def _launch(shift: float) -> Callable[..., None]:
    def launch(noise_SV: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> None:
        noise.fill_noise_rows(noise_SV, rows[rows >= 0], keys[rows >= 0])
        noise_SV += shift

    return launch


def _fail(*_: object) -> None:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("launch", "says"),
    [(_launch(0.0), None), (_launch(1e-3), "it gives other numbers on cpu"), (_fail, "RuntimeError: no compiler")],
    ids=["right", "wrong", "failing"],
)
def test_a_kernel_is_tried_before_it_is_used(
    launch: Callable[..., None], says: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other noise would be another text; a driver that Triton does not know would be a traceback."""
    monkeypatch.setitem(sys.modules, "lp.sampling.noise_kernel", SimpleNamespace(launch_fill_noise=launch))
    monkeypatch.setattr(noise, "is_installed", lambda name: True)
    works = noise._kernel_works.__wrapped__(torch.device("cpu"), torch.float32)
    assert works == (says is None)
    assert [says in record.getMessage() for record in caplog.records if says] == [True] * (says is not None)
