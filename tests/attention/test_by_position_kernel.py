"""The Triton kernels of attention by position: values and bits in Triton's interpreter, and that they compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import LONG
from tests.support.by_position_cases import SMALL
from tests.support.compiled_kernels import SHARED_KB, compiled, spilled_bytes
from tests.support.interpreted_kernels import interpreted

triton = pytest.importorskip("triton", reason="the kernels need Triton")

from lp.attention import by_position_kernel  # noqa: E402  (it needs Triton)

pytestmark = pytest.mark.xdist_group("by position")
FAST = ("prefixes", "sliding window of 20", "head dimension 80, values of 24", "bfloat16")
NAMES = [name for name in SMALL if LONG or name in FAST]  # they take seconds each to interpret


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[float, list[str]]]:
    """How far each case is off, and where its bits differ, by its name."""
    cases: dict[str, tuple[float, list[str]]] = interpreted("tests.support.by_position_cases", *NAMES)
    return cases


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_oracle(name: str, found: dict[str, tuple[float, list[str]]]) -> None:
    """A key too many or too few, a split left out or added twice: each is far above rounding."""
    assert found[name][0] <= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_the_same_bits_in_any_company(name: str, found: dict[str, tuple[float, list[str]]]) -> None:
    """In a tree, a plain step or a chunk, in whichever slots, padded or beside others: else text depends on them."""
    assert found[name][1] == []


def kernels(dim: int, dtype: str, repeats: int, capability: int) -> dict[str, Any]:
    """Both, compiled for a GPU."""
    sizes = by_position_kernel.split_sizes(dim, dim, 4 if dtype == "fp32" else 2)
    tail_sizes = by_position_kernel.tail_sizes(repeats, sizes)
    products = {"bf16": triton.language.bfloat16, "fp32": triton.language.float32}[dtype]
    fixed = {"R": repeats, "D": dim, "E": dim, "SPLIT": by_position_kernel.SPLIT, "PRODUCTS": products}
    types = {"tail_starts_base": "*i64", "window_starts_base": "*i64", "sequences_base": "*i64", "scale": "fp32"}
    types |= {"tail_keys_base": "*i64", "seen_base": "*u8"}
    types |= dict.fromkeys(("parts_base", "tops_base", "norms_base"), "*fp32")
    made = {}
    for kernel, own in ((by_position_kernel._split_kernel, sizes), (by_position_kernel._tail_kernel, tail_sizes)):
        options = {name: own[name] for name in ("num_warps", "num_stages") if name in own}
        constants = fixed | {name: value for name, value in own.items() if name not in options}
        made[kernel.__name__] = compiled(kernel, constants, types, dtype, capability, options)
    return made


@pytest.mark.subset(3)
@pytest.mark.parametrize("capability", SHARED_KB)
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bf16"), (128, "bf16"), (128, "fp32"), (256, "bf16")])
def test_they_compile_within_shared_memory_and_registers(dim: int, dtype: str, capability: int) -> None:
    """A launch that needs more shared memory than an SM has fails on the GPU alone."""
    for name, kernel in kernels(dim, dtype, 4, capability).items():
        assert kernel.metadata.shared <= SHARED_KB[capability] * 1024, name
        most = 192 if (dim, capability) == (256, 100) else 80  # there triton 3.8 spills 176 bytes
        assert spilled_bytes(kernel, capability) <= most, f"{name}: every thread stores and loads each byte again"
        if name == "_split_kernel" and capability == 90 and dtype == "bf16":
            assert "wgmma" in kernel.asm["ptx"], "an H100's tensor cores are left idle"


def test_blocks_are_the_same_for_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores of another shape may add in another order."""
    assert by_position_kernel.SPLIT % by_position_kernel.split_sizes(128, 128, 2)["BN"] == 0
    assert by_position_kernel.TAIL % by_position_kernel.TAIL_KEYS == 0
    made: list[dict[str, Any]] = []

    class Noting:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **options: made.append(options)

    monkeypatch.setattr(by_position_kernel, "_split_kernel", Noting())
    monkeypatch.setattr(by_position_kernel, "_tail_kernel", Noting())
    for num_tokens, num_keys in ((1, 5), (64, 700), (256, 9000)):
        q, k = torch.empty(1, 8, num_tokens, 64), torch.empty(1, 2, num_keys, 64)
        numbers = torch.zeros(num_tokens, 1, dtype=torch.int64)
        seen = torch.zeros(num_tokens, by_position_kernel.TAIL, dtype=torch.bool)
        by_position_kernel.launch_by_position(q, k, k, numbers, numbers, numbers, seen, torch.zeros(2, 4), 0.1)
    assert made == made[:2] * 3


def test_the_compiler_knows_its_shape() -> None:
    """torch.compile plans with the shape and the strides that it is told."""
    with torch.device("meta"):
        q, k, v = torch.empty(1, 5, 8, 64).transpose(1, 2), torch.empty(1, 2, 99, 64), torch.empty(1, 2, 99, 32)
        numbers, tails, sequences = (torch.empty(shape, dtype=torch.int64) for shape in ((5,), (5, 96), (1, 4)))
    out = torch.ops.lp.by_position(q, k, v, numbers, numbers, tails, tails != 0, sequences, 0.1)
    assert out.shape == (1, 5, 8, 32) and out.is_contiguous()
