"""Copy a model for a library that modifies its modules, while copy and original share the memory of the weights."""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedModel


def with_shared_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules, parameters and config; the memory of weights and buffers is shared, not copied.

    A library may replace, move or split the copy's parameters and add hooks, and the original stays as it is. Only an
    in-place write into a weight would change the original too. `lp.models.model_view.ModelView` does not serve
    here, since it shares the linear layers themselves with the original.

    Args:
        model: the model to copy.
    """
    memo: dict[int, object] = {id(one): nn.Parameter(one.detach(), one.requires_grad) for one in model.parameters()}
    memo |= {id(one): one.detach() for one in model.buffers()}
    return copy.deepcopy(model, memo)
