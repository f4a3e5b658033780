"""InParts tensors: pass keys, values and masks of several sequences through a model to its attention function."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class InParts(torch.Tensor):
    """A tensor that carries one tensor for each sequence of a step, for attention functions that compute one at a time.

    A model passes it on unchanged. A result computed from it is a plain tensor without parts.

    Attributes:
        parts: the tensor of each sequence, in the order of the sequences in the step.
    """

    parts: list[torch.Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> InParts:
        """Build an InParts tensor that carries the given parts and that a model sees as `whole`.

        Args:
            whole: the tensor whose content and shape the model sees.
            parts: the tensor of each sequence; they need not be views of `whole`.
        """
        tensor = whole.as_subclass(cls)
        tensor.parts = list(parts)
        return tensor

    @classmethod
    def of_all(cls, parts: Sequence[torch.Tensor]) -> InParts:
        """Build an InParts tensor from parts alone, for models that never look at the whole tensor.

        Args:
            parts: the tensor of each sequence; the first one also stands for the whole.
        """
        return cls.of(parts[0], parts)
