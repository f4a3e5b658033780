"""Gumbel noise of positions in one Triton kernel: the bits of `lp.sampling.noise`, and its values to an ulp or two of a
double's logarithms.

S: rows of the buffer, V: vocabulary.
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
def random_bits(key, token):
    """64 random bits of a token of the position that the key is of, as uint64."""
    return _mix(key.to(tl.uint64) + (token.to(tl.uint64) + 1) * GOLDEN)


@triton.jit
def gumbel_of(bits):
    """Standard Gumbel noise in float64; where 53 bits are all set the half would round up to 1: infinite noise."""
    bits = bits >> 11
    half = tl.where(bits == ALL_SET, 0.0, 0.5)
    uniform = (bits.to(tl.float64) + half) * (2.0**-53)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _fill_noise_kernel(noise_base, rows_base, keys_base, vocabulary, BLOCK: tl.constexpr):
    """Write a row's noise for a block of tokens; the grid is (blocks of tokens, rows)."""
    row = tl.load(rows_base + tl.program_id(1))
    if row >= 0:
        key = tl.load(keys_base + tl.program_id(1))
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        noise = gumbel_of(random_bits(key, token))
        tl.store(noise_base + row * vocabulary + token, noise.to(noise_base.dtype.element_ty), mask=token < vocabulary)


def launch_fill_noise(noise_SV: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> None:
    """Write noise into rows of a tensor; the arguments are those of `lp.sampling.noise.fill_noise`."""
    vocabulary = noise_SV.shape[1]
    grid = triton.cdiv(vocabulary, BLOCK), len(rows)
    assert noise_SV.is_contiguous() and rows.is_contiguous() and keys.is_contiguous()
    if len(rows):
        with torch.cuda.device_of(noise_SV):  # Triton launches on the current device
            _fill_noise_kernel[grid](noise_SV, rows, keys, vocabulary, BLOCK=BLOCK)
