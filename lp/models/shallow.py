"""A model with its first layer alone, over the same weights: its passes are those of the whole model, made short."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from lp.attention.registry import set_attention
from lp.models.fused import FusedModel
from lp.models.query_scales import scaled_by_position
from lp.models.recurrent_layers import tree_forward
from lp.models.runner import ModelRunner
from lp.models.view import ModelView

logger = logging.getLogger(__name__)
Layer = Callable[..., Any]


def shallow_runner(runner: ModelRunner, around: Callable[[Layer], Layer]) -> tuple[ModelRunner, int]:
    """A runner of the first layer, embeddings and LM head; and how many such layers the model has.

    Where no list of layers is found it runs the whole model, as one layer.

    Args:
        runner: runs the whole model; other threads may use it meanwhile.
        around: gives what is called in the layer's place.
    """
    num_layers: int = runner.config.num_hidden_layers
    shallow = copy.copy(runner)
    shallow.captured = None
    shallow.forget_kinds()
    if isinstance(runner.network, FusedModel):
        shallow.network = runner.network.first_layer(around)
        return shallow, num_layers
    view = ModelView(runner.original, lambda module: tree_forward(module) or scaled_by_position(module)).model
    set_attention(view, runner.backend)
    shallow.model = shallow.network = view
    if _cut(view, num_layers, around):
        return shallow, num_layers
    logger.info("passes of the whole model: no list of layers was found in %s", type(view).__name__)
    return shallow, 1


def _cut(model: nn.Module, num_layers: int, around: Callable[[Layer], Layer]) -> bool:
    """Leave a model its first layer; whether the layers were found."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers = next((each for each in lists if len(each) == num_layers), None)
    if layers is None:
        return False
    first = layers[0]
    vars(first)["forward"] = around(first.forward)
    layers._modules = {"0": first}
    return True
