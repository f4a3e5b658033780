"""The kernels of `lp.attention.by_position_kernel`, by their oracle on the host."""

from __future__ import annotations

import torch

from lp.attention.by_position import attention_by_position
from lp.attention.key_places import KeyPlaces

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def by_position(
    q_1HTD: torch.Tensor, k_1GND: torch.Tensor, v_1GNE: torch.Tensor, *places_and_scale: torch.Tensor | float
) -> torch.Tensor:
    """Arguments and result are those of the kernels."""
    *places, scale = places_and_scale
    if q_1HTD.dtype not in DTYPES or not q_1HTD.dtype == k_1GND.dtype == v_1GNE.dtype:
        raise RuntimeError("attention by position takes one dtype, no float64")
    assert isinstance(scale, float)
    return attention_by_position(q_1HTD, k_1GND, v_1GNE, KeyPlaces(*places), scale)  # type: ignore[arg-type]
