"""Tensors in parts: how keys, values and masks of several sequences reach an attention function."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class InParts(torch.Tensor):
    """A tensor with its parts by sequence, for attention functions that take one after the other.

    It passes through a model as it is; what is computed of it is a plain tensor, without parts.
    """

    parts: list[torch.Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> InParts:
        """Make an `InParts` of a tensor and its parts, which lie elsewhere."""
        tensor = whole.as_subclass(cls)
        tensor.parts = list(parts)
        return tensor

    @classmethod
    def of_all(cls, parts: Sequence[torch.Tensor]) -> InParts:
        """These parts, where the whole is never looked at."""
        return cls.of(parts[0], parts)
