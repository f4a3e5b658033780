"""Which kernels take the place of torch's small operations in a captured step's layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers.activations import SiLUActivation

from lp.models.architectures import NormRule

SILU = (nn.SiLU, SiLUActivation)


@dataclass(frozen=True)
class LayerKernels:
    """Each as the function of that name in `lp.models.layer_kernels`; None: torch's operations."""

    norm: Callable[[torch.Tensor, torch.Tensor, float, NormRule], torch.Tensor] | None = None
    rotate_and_store: Callable[..., torch.Tensor] | None = None
    silu_times: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


NO_KERNELS = LayerKernels()
