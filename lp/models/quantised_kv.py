"""Keys and values stored in one byte per number, to save memory: how a cache slot stores and attention reads them.

The keys of one token and head are a row of bytes, and so are its values: D rounded numbers, then the row's scale in
float32. Numbers and scale lie side by side, so that code that moves, copies or sends slots need not know about them. A
row is quantised once, when its token is computed. Every pass reads the same quantised values, the pass of the token
itself included.

    scale = max |x| / LARGEST        number = round(x / scale)        read: number x scale

The scale is float32 whatever the model's dtype. In float16 the scale of a row of small keys could underflow. In
bfloat16 the scale would be rounded: rounded down, it would cut off the largest number of a row, and rounded up, it
would waste a part of the range. The scale costs 4 bytes a row.

D: head dimension.
"""

from __future__ import annotations

import torch

from lp.config import KVDtype

SCALE_BYTES = 4
LARGEST = {KVDtype.INT8: 127.0, KVDtype.FP8: 448.0}  # of the numbers; int8's -128 has no counterpart


def quantised(states_D: torch.Tensor, kv_dtype: KVDtype) -> torch.Tensor:
    """Quantise keys or values to the rows of bytes that cache slots store.

    A row is the D numbers of one token and head. If it is not finite, or its scale does not fit into float32, all of it
    is read as NaN later.

    Args:
        states_D: keys or values (..., D), in the model's dtype; D is the head dimension.
        kv_dtype: INT8 or FP8.

    Returns:
        int8, (..., D + SCALE_BYTES): D numbers, then the bytes of their scale.
    """
    largest = LARGEST[kv_dtype]
    wide_D = states_D.to(torch.promote_types(states_D.dtype, torch.float32))
    scale_1 = (wide_D.abs().amax(-1, keepdim=True) / largest).float()
    ratio_D = (wide_D / scale_1.to(wide_D.dtype)).nan_to_num(0.0, 0.0, 0.0).clamp(-largest, largest)  # of zeros: 0
    numbers_D = ratio_D.round().to(torch.int8)
    if kv_dtype is KVDtype.FP8:
        numbers_D = ratio_D.float().to(torch.float8_e4m3fn).view(torch.int8)
    return torch.cat([numbers_D, scale_1.view(torch.int8)], -1)


def dequantised(rows_B: torch.Tensor, kv_dtype: KVDtype, dtype: torch.dtype) -> torch.Tensor:
    """Turn the rows of bytes that cache slots store back into keys or values for attention.

    Args:
        rows_B: int8, (..., D + SCALE_BYTES), from `quantised`: D numbers, then the bytes of their scale.
        kv_dtype: INT8 or FP8, as they were quantised.
        dtype: dtype of the result, the model's.

    Returns:
        Keys or values (..., D).
    """
    numbers_D = rows_B[..., :-SCALE_BYTES]
    scale_1 = rows_B[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned
    if kv_dtype is KVDtype.FP8:
        # As float16 of a 256th of each, whose bits are the same after a longer exponent: CPUs turn float8 into others
        # one by one, which takes ten times as long.
        numbers_D = (numbers_D.to(torch.int16) << 7 & ~(1 << 14)).view(torch.float16)
        scale_1 = scale_1 * 256
    wide = torch.promote_types(dtype, torch.float32)
    return numbers_D.to(wide).mul_(scale_1.to(wide)).to(dtype)
