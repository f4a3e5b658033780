"""The kernels of `lp.models.layer_kernels`, by torch on the host. Arguments and results are those of the kernels."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from lp.models.architectures import NormRule
from lp.models.layer_operations import Norm, rotate


def normalize(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, rounded: bool, offset: bool) -> torch.Tensor:
    rule = NormRule.ROUNDED if rounded else NormRule.OFFSET if offset else NormRule.WIDE
    return Norm(weight_E, eps, rule)(x_TE)


def rotate_and_store(
    rotated_THD: torch.Tensor,
    values_TGD: torch.Tensor,
    cos_T1D: torch.Tensor,
    sin_T1D: torch.Tensor,
    k_1GCD: torch.Tensor,
    v_1GCD: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    turned_THD = rotate(rotated_THD, cos_T1D, sin_T1D)
    num_heads = rotated_THD.shape[1] - values_TGD.shape[1]
    k_1GCD.index_copy_(2, slots_T, turned_THD[:, num_heads:].transpose(0, 1)[None])
    v_1GCD.index_copy_(2, slots_T, values_TGD.transpose(0, 1)[None])
    return turned_THD[:, :num_heads].contiguous()


def silu_times(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    return F.silu(gate_TF) * up_TF


def move_slots(buffer_nGCD: torch.Tensor, source_M: torch.Tensor, target_M: torch.Tensor) -> None:
    buffer_nGCD.index_copy_(2, target_M, buffer_nGCD.index_select(2, source_M))
