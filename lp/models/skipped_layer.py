"""What stands in a model where a layer, or the LM head, is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(eq=False)
class OutputForm:
    """What the layers of a model return besides hidden states.

    Attributes:
        rest: what comes behind hidden states in a tuple; None: layers return hidden states alone.
    """

    rest: tuple[Any, ...] | None = None

    def note(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Take it from the output of a layer: a forward hook."""
        self.rest = tuple(output[1:]) if isinstance(output, tuple) else None


class SkippedLayer(nn.Module):
    """A decoder layer that hands on what it is given; it has the attributes of the one in whose place it is.

    Args:
        layer: the layer in whose place it is, which is no part of this module.
        index: index of that layer among all.
        form: what the layer returns besides hidden states.
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
    """Takes the place of the LM head where no logits are needed: it returns what it is given.

    Args:
        dtype: dtype of a weight, which some models ask for.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        vars(self)["weight"] = torch.empty(0, dtype=dtype)
        self.eval()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states
