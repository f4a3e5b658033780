"""The noise kernel against torch's; as a program, in Triton's interpreter on a CPU."""

from __future__ import annotations

import json
import math
import os
from itertools import product

import torch
import triton
import triton.language as tl

from lp.kernel_launch import LAUNCH
from lp.sampling import noise
from lp.sampling.noise import BELOW_1, fill_noise_rows, position_key
from lp.sampling.noise_kernel import gumbel_of, launch_fill_noise, random_bits

KEYS = (0, 5, -1, -(1 << 63), position_key(7, 3, 9), position_key(2**62 + 1, 0, (1 << 31) + 5))
SHAPES = ((3, 1, [1]), (6, 1500, [4, -1, 0, 1, 5, 2]), (5, 97, [-1, 3, 2, -1]))  # S, V, rows


def worst_error(dtype: torch.dtype, device: torch.device) -> float:
    """The largest difference of a value, in ulp of the value, of 1 where it is smaller; infinite for a row too many.

    Near 0 the outer logarithm magnifies the last bit of the inner one, in torch as in the kernel.
    """
    worst = 0.0
    for key, (size, vocabulary, wanted) in product(KEYS, SHAPES):
        found = torch.zeros(size, vocabulary, dtype=dtype, device=device)
        rows = torch.tensor(wanted)
        keys = key ^ torch.arange(len(rows))
        launch_fill_noise(found, rows.to(device), keys.to(device))
        expected = torch.zeros(size, vocabulary, dtype=torch.float64)
        fill_noise_rows(expected, rows[rows >= 0], keys[rows >= 0])
        ulp = torch.finfo(dtype).eps * expected.abs().log2().floor().exp2().clamp(min=1)
        errors = (found.cpu().double() - expected.to(dtype).double()).abs() / ulp
        filled = bool(((found.cpu() != 0).any(1) == (expected != 0).any(1)).all())
        worst = max(worst, float(errors.max()) if filled else float("inf"))
    return worst


@triton.jit
def _store_bits(out_base, keys_base, SIZE: tl.constexpr):
    token = tl.arange(0, SIZE)
    tl.store(out_base + token, random_bits(tl.load(keys_base), token).to(tl.int64, bitcast=True))


@triton.jit
def _store_noise(out_base, bits_base):
    tl.store(out_base, gumbel_of(tl.load(bits_base).to(tl.uint64, bitcast=True)))


def same_bits(device: torch.device) -> bool:
    """Whether the kernel's 64 bits of a number are torch's, integers both."""
    for key in KEYS:
        bits = torch.zeros(256, dtype=torch.int64, device=device)
        keys = torch.tensor([key], device=device)
        _store_bits[(1,)](bits, keys, SIZE=256, **LAUNCH)
        if not torch.equal(bits, noise.random_bits(keys, 256)[0]):
            return False
    return True


def largest_is_finite(device: torch.device) -> bool:
    """Whether the noise of 64 set bits is torch's, which is that of the largest double below 1."""
    found = torch.zeros(1, dtype=torch.float64, device=device)
    _store_noise[(1,)](found, torch.tensor([-1], device=device), **LAUNCH)
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
