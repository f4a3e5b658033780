"""Gumbel noise of a range of positions in one Triton kernel: the bits of `lp.sampling.noise`, and its values to an ulp
or two of a double's logarithms.

C: rows of the buffer, V: vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # this and the next two: splitmix64's constants
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
ALL_SET = tl.constexpr((1 << 53) - 1)
BLOCK = 1024  # tokens of a program


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * MIX_1
    value = (value ^ (value >> 27)) * MIX_2
    return value ^ (value >> 31)


@triton.jit
def random_bits(key, position, token):
    """64 random bits of a position's token, as uint64."""
    position_key = _mix(key.to(tl.uint64) + position.to(tl.uint64) * GOLDEN + GOLDEN)
    return _mix(position_key + (token.to(tl.uint64) + 1) * GOLDEN)


@triton.jit
def gumbel_of(bits):
    """Standard Gumbel noise in float64; where 53 bits are all set the half would round up to 1: infinite noise."""
    bits = bits >> 11
    half = tl.where(bits == ALL_SET, 0.0, 0.5)
    uniform = (bits.to(tl.float64) + half) * (2.0**-53)
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["key", "first_position", "capacity"])
def _gumbel_rows_kernel(noise_base, key: tl.int64, first_position: tl.int64, capacity, vocabulary, BLOCK: tl.constexpr):
    """Grid (blocks of tokens, positions)."""
    position = first_position + tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    noise = gumbel_of(random_bits(key, position, token))
    row = (position % capacity).to(tl.int64)
    tl.store(noise_base + row * vocabulary + token, noise.to(noise_base.dtype.element_ty), mask=token < vocabulary)


def launch_gumbel_rows(noise_CV: torch.Tensor, key: int, first_position: int, count: int) -> None:
    """Arguments as those of `lp.sampling.noise.gumbel_rows`."""
    capacity, vocabulary = noise_CV.shape
    assert noise_CV.is_contiguous() and count <= capacity
    with torch.cuda.device_of(noise_CV):  # Triton launches on the current device
        _gumbel_rows_kernel[(triton.cdiv(vocabulary, BLOCK), count)](
            noise_CV, key, first_position, capacity, vocabulary, BLOCK=BLOCK
        )
