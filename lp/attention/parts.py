"""InParts: hands the keys, values and masks of several sequences through a model to its attention function."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class InParts(torch.Tensor):
    """A tensor that carries one tensor for each sequence of a step, for attention functions that compute one by one.

    A model hands it on as it is. A result computed from it is a plain tensor without parts.

    Attributes:
        parts: the tensor of each sequence, in their order in the step.
    """

    parts: list[torch.Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> InParts:
        """Make an InParts that a model sees as `whole`; the parts need not be views of it."""
        tensor = whole.as_subclass(cls)
        tensor.parts = list(parts)
        return tensor

    @classmethod
    def of_all(cls, parts: Sequence[torch.Tensor]) -> InParts:
        """Make an InParts of parts alone, where the model never looks at the whole."""
        return cls.of(parts[0], parts)
