"""Computes the Gumbel noise of several positions with one Triton kernel, which a CUDA graph can record.

Its random bits are those of `lp.sampling.noise`. Its noise may differ from the noise there by one or two units in the
last place of float64, since GPUs round logarithms otherwise.

S: rows of the buffer, V: vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lp.kernel_launch import LAUNCH

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
    """64 random bits, as uint64, for a token at a position; equal to those of `lp.sampling.noise.random_bits`.

    Args:
        key: int64, the position's key, made by `lp.sampling.noise.position_key`.
        token: a token id, or a block of token ids.
    """
    return _mix(key.to(tl.uint64) + (token.to(tl.uint64) + 1) * GOLDEN)


@triton.jit
def gumbel_of(bits):
    """Turn the upper 53 of 64 random bits into standard Gumbel noise, in float64.

    The bits, as an integer plus 0.5, are scaled to a number in (0, 1). If all 53 bits are set, 0.5 is not added, since
    the sum would round up to 1, whose noise is infinite.

    Args:
        bits: the random bits, uint64.
    """
    bits = bits >> 11
    half = tl.where(bits == ALL_SET, 0.0, 0.5)
    uniform = (bits.to(tl.float64) + half) * (2.0**-53)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _fill_noise_kernel(noise_base, rows_base, keys_base, vocabulary, BLOCK: tl.constexpr):
    """Write the noise of one row for one block of tokens; the grid is (blocks of tokens, rows)."""
    row = tl.load(rows_base + tl.program_id(1))
    if row >= 0:
        key = tl.load(keys_base + tl.program_id(1))
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        noise = gumbel_of(random_bits(key, token))
        tl.store(noise_base + row * vocabulary + token, noise.to(noise_base.dtype.element_ty), mask=token < vocabulary)


def launch_fill_noise(noise_SV: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> None:
    """Compute the Gumbel noise of n positions into rows of a buffer on a GPU, with one kernel.

    Args:
        noise_SV: float32 or float64 (S, V), contiguous, on CUDA: S rows with noise for each token of the vocabulary;
            changed in place.
        rows: int64 (n,), the row to write for each position, all different; -1 skips the position.
        keys: int64 (n,), a key for each position, made by `lp.sampling.noise.position_key`.
    """
    vocabulary = noise_SV.shape[1]
    grid = triton.cdiv(vocabulary, BLOCK), len(rows)
    assert noise_SV.is_contiguous() and rows.is_contiguous() and keys.is_contiguous()
    if len(rows):
        with torch.cuda.device_of(noise_SV):  # Triton launches on the current device
            _fill_noise_kernel[grid](noise_SV, rows, keys, vocabulary, BLOCK=BLOCK, **LAUNCH)
