"""The oracle's own quantised cache: transformers' cache, with keys and values rounded on their way in.

It holds them in the model's dtype: what counts is what attention reads, and that nothing here is of `lp.models`.

D: head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from lp.config import KVDtype


class RoundedCache(DynamicCache):
    """A cache whose keys and values are what one byte each, with a scale for each head and token, can hold.

    Args:
        kv_dtype: what the bytes are.
        options: further arguments, as DynamicCache takes them.
    """

    def __init__(self, kv_dtype: KVDtype, **options: Any) -> None:
        super().__init__(**options)
        self._rounded = {KVDtype.INT8: rounded_to_int8, KVDtype.FP8: rounded_to_fp8}[kv_dtype]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = self._rounded(key_states), self._rounded(value_states)
        keys_and_values: tuple[torch.Tensor, torch.Tensor] = super().update(*rounded, *args, **kwargs)
        return keys_and_values


def rounded_to_int8(states_D: torch.Tensor) -> torch.Tensor:
    """Keys or values (..., D), each row rounded to 255 steps between its largest number and minus that."""
    x_D, scale = _scaled(states_D, 127)
    return (torch.round(x_D) * scale).to(states_D.dtype)


def rounded_to_fp8(states_D: torch.Tensor) -> torch.Tensor:
    """Keys or values (..., D), each row rounded to float8_e4m3fn, of which the largest number is 448."""
    x_D, scale = _scaled(states_D, 448)
    return (x_D.float().to(torch.float8_e4m3fn).to(scale.dtype) * scale).to(states_D.dtype)


def _scaled(states_D: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in [-largest, largest] by row, and the float32 number that each row is a multiple of."""
    x_D = states_D.double() if states_D.dtype == torch.float64 else states_D.float()
    scale = (x_D.abs().max(-1, keepdim=True).values / largest).to(torch.float32).to(x_D.dtype)
    scale = scale.where(scale.isfinite(), torch.nan)
    return (x_D / scale.where(scale > 0, 1)).clamp(-largest, largest), scale
