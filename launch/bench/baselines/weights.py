"""A copy of a model for a library that changes its modules, without a copy of its weights."""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedModel


def with_shared_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model with modules, parameters and a config of its own, over the same memory of weights and buffers.

    A library may replace its parameters, move or split them, and add hooks; only what it writes into a weight's own
    memory would reach the original. `lp.models.view.ModelView` would not do: it shares linear layers as they are.
    """
    memo: dict[int, object] = {id(one): nn.Parameter(one.detach(), one.requires_grad) for one in model.parameters()}
    memo |= {id(one): one.detach() for one in model.buffers()}
    return copy.deepcopy(model, memo)
