"""The noise kernel against torch's; as a program, in Triton's interpreter on a CPU."""

from __future__ import annotations

import json
import math
import os
from itertools import product

import torch
import triton
import triton.language as tl

from lp.sampling import noise
from lp.sampling.noise import BELOW_1, fill_gumbel_rows, sequence_key
from lp.sampling.noise_kernel import gumbel_of, launch_gumbel_rows, random_bits

KEYS = (0, 5, -1, -(1 << 63), sequence_key(7, 3) >> 1, -(sequence_key(8, 0) >> 1))
SHAPES = ((1, 1, 0, 1), (6, 1500, 1_000_003, 5), (4, 97, 3, 4))  # C, V, first position, count


def worst_error(dtype: torch.dtype, device: torch.device) -> float:
    """The largest difference of a value, in ulp of the value, of 1 where it is smaller; infinite for a row too many.

    Near 0 the outer logarithm magnifies the last bit of the inner one, in torch as in the kernel.
    """
    worst = 0.0
    for key, (capacity, vocabulary, first, count) in product(KEYS, SHAPES):
        rows = torch.zeros(capacity, vocabulary, dtype=dtype, device=device)
        launch_gumbel_rows(rows, key, first, count)
        expected = torch.zeros(capacity, vocabulary, dtype=torch.float64)
        fill_gumbel_rows(expected, key, first, count)
        ulp = torch.finfo(dtype).eps * expected.abs().log2().floor().exp2().clamp(min=1)
        errors = (rows.cpu().double() - expected.to(dtype).double()).abs() / ulp
        filled = bool(((rows.cpu() != 0).any(1) == (expected != 0).any(1)).all())
        worst = max(worst, float(errors.max()) if filled else float("inf"))
    return worst


@triton.jit
def _store_bits(out_base, key: tl.int64, position: tl.int64, SIZE: tl.constexpr):
    token = tl.arange(0, SIZE)
    tl.store(out_base + token, random_bits(key, position + tl.program_id(0), token).to(tl.int64, bitcast=True))


@triton.jit
def _store_noise(out_base, bits_base):
    tl.store(out_base, gumbel_of(tl.load(bits_base).to(tl.uint64, bitcast=True)))


def same_bits(device: torch.device) -> bool:
    """Whether the kernel's 64 bits of a number are torch's, integers both."""
    for key, position in product(KEYS, (0, 1, 1_000_003, (1 << 31) + 5)):
        bits = torch.zeros(256, dtype=torch.int64, device=device)
        _store_bits[(1,)](bits, key, position, SIZE=256)
        if not torch.equal(bits, noise.random_bits([noise._keyed(key, position)], 256, device)[0]):
            return False
    return True


def largest_is_finite(device: torch.device) -> bool:
    """Whether the noise of 64 set bits is torch's, which is that of the largest double below 1."""
    found = torch.zeros(1, dtype=torch.float64, device=device)
    _store_noise[(1,)](found, torch.tensor([-1], device=device))
    return abs(float(found) + math.log(-math.log(BELOW_1))) < 1e-12


def main() -> None:
    """Prints what was found as JSON."""
    torch.set_num_threads(1)
    assert os.environ.get("TRITON_INTERPRET") == "1", "compiled kernels need a GPU"
    cpu = torch.device("cpu")
    errors = {str(dtype): worst_error(dtype, cpu) for dtype in (torch.float32, torch.float64)}
    print(json.dumps({"same_bits": same_bits(cpu), "largest_is_finite": largest_is_finite(cpu), **errors}))


if __name__ == "__main__":
    main()
