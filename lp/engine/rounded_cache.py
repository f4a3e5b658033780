"""A quantised KV cache to check lp's against: transformers' cache, with keys and values rounded before they are stored.

`AutoregressiveDecoder` uses it. It stores rounded values in the model's dtype: only the values that attention reads
matter here, and that the code shares nothing with `lp.models`.

D: head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from lp.config import KVDtype


class RoundedCache(DynamicCache):
    """Transformers' cache, with keys and values rounded to one byte each, with a scale for each head and token.

    Args:
        kv_dtype: dtype to round keys and values to: INT8 or FP8.
        options: further arguments of DynamicCache.
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
    """Round keys or values (..., D) as int8 storage would: in each row to multiples of its largest magnitude / 127."""
    x_D, scale = _scaled(states_D, 127)
    return (torch.round(x_D) * scale).to(states_D.dtype)


def rounded_to_fp8(states_D: torch.Tensor) -> torch.Tensor:
    """Round keys or values (..., D) as float8_e4m3fn storage would, each row scaled so that its largest is 448."""
    x_D, scale = _scaled(states_D, 448)
    return (x_D.float().to(torch.float8_e4m3fn).to(scale.dtype) * scale).to(states_D.dtype)


def _scaled(states_D: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each row to [-largest, largest]; returns it with the scales, rounded to float32, to multiply by again."""
    x_D = states_D.double() if states_D.dtype == torch.float64 else states_D.float()
    scale = (x_D.abs().max(-1, keepdim=True).values / largest).to(torch.float32).to(x_D.dtype)
    scale = scale.where(scale.isfinite(), torch.nan)
    return (x_D / scale.where(scale > 0, 1)).clamp(-largest, largest), scale
