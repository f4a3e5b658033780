"""The small operations of a decoder layer, computed by torch; `lp.models.layer_kernels` has Triton kernels for them.

T: step tokens, E: hidden size, D: head dimension.
"""

from __future__ import annotations

import torch

from lp.models.architectures import NormRule


class Norm:
    """An RMS norm that fused layers run: equal to transformers' RMSNorm classes, which compute in float32.

    Args:
        weight: the norm's weight, (E,).
        eps: added to the mean square.
        rule: whether it rounds to the model's dtype before or after multiplying by the weight.
    """

    def __init__(self, weight: torch.Tensor, eps: float, rule: NormRule) -> None:
        self.weight = weight
        self.eps = eps
        self.rule = rule
        self.eps_1 = weight.new_full((1,), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        shape = weight.shape
        if x.dtype is torch.float32 and not x.is_cuda and self.rule is not NormRule.OFFSET:
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # torch.rms_norm is a dozen operations on a CPU
            return (x * torch.addcmul(self.eps_1, norm, norm, value=1 / len(weight)).rsqrt_()).mul_(weight)
        if self.rule is NormRule.OFFSET:
            return torch.rms_norm(x.float(), shape, 1.0 + weight.float(), self.eps).to(x.dtype)
        if x.dtype is torch.float64:
            return torch.rms_norm(x.float(), shape, None, self.eps) * weight
        if self.rule is NormRule.ROUNDED and x.dtype is not torch.float32:
            return torch.rms_norm(x, shape, None, self.eps) * weight
        return torch.rms_norm(x, shape, weight, self.eps)

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise queries or keys, (T, heads, D): each head by itself, or all together if the weight spans them."""
        return self(x.reshape(len(x), -1, len(self.weight))).view(x.shape)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to queries or keys.

    Args:
        states: queries or keys, (T, heads, D): T tokens, head dimension D.
        cos, sin: cosines and sines of the rotation's angles, (T, 1, D); the first half of the sines is negated.
    """
    wide = states.to(cos.dtype)
    swapped = wide.roll(wide.shape[-1] // 2, -1)
    return torch.addcmul(wide * cos, swapped, sin).to(states.dtype)
