"""Copy a model for a library that changes modules, without copying the weights."""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedModel


def with_shared_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with its own modules, parameters and config, over the same memory of weights and buffers.

    A library may replace, move or split the copy's parameters and add hooks; only a write into a weight's memory would
    reach the original. `lp.models.view.ModelView` does not do: it shares linear layers as they are.

    Args:
        model: the model to copy.
    """
    memo: dict[int, object] = {id(one): nn.Parameter(one.detach(), one.requires_grad) for one in model.parameters()}
    memo |= {id(one): one.detach() for one in model.buffers()}
    return copy.deepcopy(model, memo)
