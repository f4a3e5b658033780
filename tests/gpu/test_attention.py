"""Every attention backend against float64, on the GPU; `scripts/gpu_check.sh --dry-run` runs the same on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.gpu.parity import DTYPES, HEAD_DIMS, HEADS, TOLERANCE, attended, model_of, reference, worst

pytestmark = pytest.mark.gpu
BACKENDS = ("sdpa", "eager", "flash")
CASES = [
    *itertools.product(BACKENDS, DTYPES, HEAD_DIMS, HEADS),
    *itertools.product(["flex"], [torch.bfloat16], HEAD_DIMS, ["GQA"]),  # compiles for every shape
]


@pytest.mark.parametrize(("attention", "dtype", "head_dim", "kind"), CASES, ids=str)
def test_a_backend_is_as_near_float64_as_its_dtype(
    attention: str, dtype: torch.dtype, head_dim: int, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """A kernel of another head dimension, or one that reads keys past the prefix, is seen by nothing else."""
    record_property("part", f"attention {attention}")
    record_property("dtype", str(dtype).removeprefix("torch."))
    model = model_of(kind, head_dim, dtype)
    try:
        output = attended(model, attention)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    error = worst(output, reference(kind, head_dim, dtype))
    record_property("error", error)
    record_property("tolerance", TOLERANCE[dtype])
    assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_mask_is_far_outside(dtype: torch.dtype) -> None:
    """A tolerance so wide that it passes a wrong mask checks nothing."""
    right, wrong = reference("GQA", 64, dtype), reference("GQA", 64, dtype, flip=True)
    for (prefix, name), states in right.items():
        error = float((wrong[prefix, name][-1] - states[-1]).norm() / states[-1].norm())
        if name != "one token" and prefix <= 17:
            assert error > 4 * TOLERANCE[dtype], (prefix, name, error)
