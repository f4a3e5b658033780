"""Plain decoding by transformers' own code over keys and values that are rounded here, in numpy: no code of lp's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from tests.support.tiny_models import plain_greedy

KINDS = ("int8", "fp8")
# float8_e4m3fn by its definition: 8 steps in each power of two from 2**-6 on, below that steps of 2**-9; up to 448.
FP8 = np.array(sorted({(8 + m) * 2.0 ** (e - 3) for e in range(-6, 9) for m in range(8)} | {m / 512 for m in range(8)}))
FP8 = FP8[FP8 <= 448]


def rounded(states: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Keys or values (..., D) as a byte each holds them, with the float32 scale of each row."""
    x = states.double().numpy() if states.dtype == torch.float64 else states.float().numpy()
    largest = {"int8": 127, "fp8": 448}[kv_dtype]
    scale = (np.abs(x).max(-1, keepdims=True) / x.dtype.type(largest)).astype(np.float32).astype(x.dtype)
    numbers = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
    nearest = np.rint(numbers) if kv_dtype == "int8" else nearest_fp8(numbers)
    return torch.from_numpy(np.clip(nearest, -largest, largest).astype(x.dtype) * scale).to(states.dtype)


def nearest_fp8(numbers: np.ndarray) -> np.ndarray:
    """The nearest of FP8 to each, of two equally near ones that with the even last bit."""
    size = np.abs(numbers).astype(np.float32).astype(np.float64)
    above = np.searchsorted(FP8, size).clip(1, len(FP8) - 1)
    low, high = FP8[above - 1], FP8[above]
    takes_high = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    nearest: np.ndarray = np.copysign(np.where(takes_high, high, low), numbers)
    return nearest


class OwnCache(DynamicCache):
    """transformers' cache with rounded keys and values.

    Args:
        kv_dtype: "int8" or "fp8".
        config: the model's.
    """

    def __init__(self, kv_dtype: str, config: Any) -> None:
        super().__init__(config=config)
        self.kv_dtype = kv_dtype

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(rounded(key_states, self.kv_dtype), rounded(value_states, self.kv_dtype), *args, **kwargs)


def rounded_greedy(model: PreTrainedModel, ids: list[int], new: int, kv_dtype: str, **asked: Any) -> list[int]:
    """The tokens of transformers' own `generate` over such a cache."""
    return plain_greedy(model, ids, new, past_key_values=OwnCache(kv_dtype, model.config), **asked)
