"""Make a runner for a model's first layer alone, over the same weights, to estimate the time of the whole model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from lp.attention.registry import set_attention
from lp.models.fused import FusedModel
from lp.models.model_view import ModelView
from lp.models.query_scales import scaled_by_position
from lp.models.recurrent_layers import tree_forward
from lp.models.runner import ModelRunner

logger = logging.getLogger(__name__)
Layer = Callable[..., Any]


def shallow_runner(runner: ModelRunner, around: Callable[[Layer], Layer]) -> tuple[ModelRunner, int]:
    """Make a runner for the embeddings, the first layer and the LM head alone, to estimate the whole model's time.

    Where no list of layers is found in the model, the runner runs the whole model, which then counts as one layer.

    Args:
        runner: runs the whole model; other threads may use it meanwhile.
        around: given the layer's forward, returns the function to call instead of it, such as one that calls and times
            it.

    Returns:
        The new runner, and how often the model has the layer that it runs.
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
    """Remove all layers of a model but the first; returns whether a list of layers was found."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers = next((each for each in lists if len(each) == num_layers), None)
    if layers is None:
        return False
    first = layers[0]
    vars(first)["forward"] = around(first.forward)
    layers._modules = {"0": first}
    return True
