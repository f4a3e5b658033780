"""The Triton kernel of tree attention: its values in Triton's interpreter, and that it compiles for GPUs there are."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import LONG
from tests.support.compiled_kernels import SHARED_KB, compiled, spilled_bytes
from tests.support.interpreted_kernels import interpreted
from tests.support.tree_kernel_cases import SMALL

triton = pytest.importorskip("triton", reason="the tree kernel needs Triton")

from lp.attention import tree_kernel  # noqa: E402  (it needs Triton)

pytestmark = pytest.mark.xdist_group("tree kernel")


NAMES = [name for name in SMALL if LONG or name not in ("512 tokens", "sinks of bfloat16")]  # 10 s of interpreting


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """How far each case is off, by its name."""
    found: dict[str, float] = interpreted("tests.support.tree_kernel_cases", *NAMES)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_is_softmax_attention(name: str, errors: dict[str, float]) -> None:
    """A key too many or too few, a NaN behind the step's keys, a split left out: each is far above rounding."""
    assert errors[name] <= 1


def test_the_capacity_changes_no_bit(errors: dict[str, float]) -> None:
    """A buffer that an earlier, longer text has left would change the order of sums, and so near-ties."""
    assert errors["results at different capacities"] == 1


@pytest.mark.subset(5)
@pytest.mark.parametrize("sequences", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_rows", "dim", "dtype", "capability"),
    [
        (64, 128, "bf16", 80),
        (512, 128, "bf16", 90),
        (64, 256, "fp16", 80),
        pytest.param(512, 96, "fp16", 80, marks=pytest.mark.slow),
        pytest.param(64, 256, "fp16", 90, marks=pytest.mark.slow),
        pytest.param(64, 256, "fp32", 80, marks=pytest.mark.slow),
        pytest.param(16, 80, "fp32", 90, marks=pytest.mark.slow),
    ],
)
def test_it_compiles_within_shared_memory(
    num_rows: int, dim: int, dtype: str, capability: int, sequences: bool
) -> None:
    """A launch that needs more shared memory than an SM has fails on the GPU alone."""
    itemsize = 4 if dtype == "fp32" else 2
    sizes = tree_kernel.block_sizes(num_rows, dim, dim, itemsize)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    products = {
        "bf16": triton.language.bfloat16,
        "fp16": triton.language.float16,
        "fp32": triton.language.float32,
    }[dtype]
    flags = {
        "HAS_SLOTS": not sequences,
        "HAS_SEQUENCES": sequences,
        "SPLIT": True,
        "ADDITIVE": True,
        "PRODUCTS": products,
        "HAS_SINKS": False,
    }
    kernel = compiled(
        tree_kernel._split_kernel,
        {"R": 4, "D": dim, "E": dim, **flags, **sizes},
        {"slots_base": "*i64", "sequences_base": "*i64", "out_base": "*fp32", "lse_base": "*fp32", "scale": "fp32"},
        dtype,
        capability,
        options,
    )
    assert kernel.metadata.shared <= SHARED_KB[capability] * 1024
    if capability == 90 and itemsize == 2 and sizes["BM"] >= 64:
        assert "wgmma" in kernel.asm["ptx"], "an H100's tensor cores are left idle"
    if dim <= 128:
        assert spilled_bytes(kernel, capability) <= 64, "each byte is stored and loaded again by every thread"


@pytest.mark.parametrize("capability", SHARED_KB)
def test_the_combination_compiles(capability: int) -> None:
    constants = {"R": 4, "E": 80, "BE": 128, "BS": tree_kernel.COMBINED_SPLITS, "HAS_SINKS": True}
    types = {"parts_base": "*fp32", "lse_base": "*fp32"}
    kernel = compiled(tree_kernel._combine_kernel, constants, types, "bf16", capability, {})
    assert kernel.metadata.shared <= SHARED_KB[capability] * 1024


@pytest.mark.parametrize("capability", [80, 90])
def test_sinks_compile(capability: int) -> None:
    """Without splits, the first kernel adds the sinks itself; in the shapes of gpt_oss."""
    sizes = tree_kernel.block_sizes(512, 64, 64, 2)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    flags = {"HAS_SLOTS": True, "HAS_SEQUENCES": False, "SPLIT": False, "ADDITIVE": True, "HAS_SINKS": True}
    constants = {"R": 8, "D": 64, "E": 64, **flags, "PRODUCTS": triton.language.bfloat16, **sizes}
    types = {"slots_base": "*i64", "lse_base": "*bf16", "scale": "fp32"}
    kernel = compiled(tree_kernel._split_kernel, constants, types, "bf16", capability, options)
    assert kernel.metadata.shared <= SHARED_KB[capability] * 1024
    assert spilled_bytes(kernel, capability) <= 64


def test_splits_fill_the_gpu() -> None:
    """64 tokens of 32 heads are 32 programs: without splits 100 of 132 SMs would have nothing to do."""
    choose = tree_kernel.choose_splits
    assert choose(num_row_blocks=1, kv_heads=32, num_key_blocks=1000, num_sms=132) == 8
    assert choose(num_row_blocks=1, kv_heads=8, num_key_blocks=1000, num_sms=132) == 33
    assert choose(num_row_blocks=8, kv_heads=32, num_key_blocks=1000, num_sms=132) == 1
    assert choose(num_row_blocks=16, kv_heads=64, num_key_blocks=1000, num_sms=132) == 1
    assert choose(num_row_blocks=1, kv_heads=2, num_key_blocks=4, num_sms=132) == 4
    assert choose(num_row_blocks=1, kv_heads=1, num_key_blocks=1000, num_sms=132) == tree_kernel.LARGEST_SPLITS


@pytest.mark.parametrize("num_rows", [1, 17, 4096])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_blocks_are_what_triton_takes(num_rows: int, itemsize: int) -> None:
    """Powers of 2, and 16 at least where tensor cores multiply."""
    for dim in (8, 64, 80, 96, 128, 256):
        sizes = tree_kernel.block_sizes(num_rows, dim, 64, itemsize)
        for name in ("BD", "BE", "BM", "BN"):
            assert sizes[name] >= 16 and sizes[name].bit_count() == 1
        assert sizes["BD"] >= dim and sizes["BE"] >= 64


def test_the_compiler_knows_its_shape() -> None:
    """torch.compile plans with the shape and the strides that it is told."""
    with torch.device("meta"):
        q, k, v = torch.empty(1, 5, 8, 64).transpose(1, 2), torch.empty(1, 2, 99, 64), torch.empty(1, 2, 99, 32)
        mask, slots = torch.empty(5, 5), torch.empty(5, dtype=torch.int64)
    out = torch.ops.lp.tree_attention(q, k, v, mask, slots, 0.1)
    assert out.shape == (1, 8, 5, 32) and out.transpose(1, 2).is_contiguous()
