"""Stand-ins for layers, or the LM head, that a view of a model leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(eq=False)
class OutputForm:
    """What the layers of a model return besides hidden states, so that their stand-ins return it, too.

    Attributes:
        rest: what follows the hidden states in the tuple that layers return; None: layers return hidden states alone.
    """

    rest: tuple[Any, ...] | None = None

    def note(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Record what a layer returns besides hidden states; called as a forward hook of that layer."""
        self.rest = tuple(output[1:]) if isinstance(output, tuple) else None


class SkippedLayer(nn.Module):
    """Stands in for a decoder layer that is skipped: returns its input, and has the attributes of that layer.

    Args:
        layer: the layer that it stands in for, which is not registered as a submodule.
        index: index of that layer in the model.
        form: what the model's layers return besides hidden states.
    """

    def __init__(self, layer: nn.Module, index: int, form: OutputForm) -> None:
        super().__init__()
        self.index = index
        self.form = form
        self.training = layer.training
        vars(self)["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        return states if self.form.rest is None else (states, *self.form.rest)


class NoHead(nn.Module):
    """Stands in for the LM head where no logits are needed, and returns its input, the hidden states.

    Args:
        dtype: dtype of its empty `weight`, which some models look up.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        vars(self)["weight"] = torch.empty(0, dtype=dtype)
        self.eval()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states
