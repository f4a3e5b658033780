"""accelerate's pipeline: layers spread over the GPUs of this process, which work one after the other."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lp.engine.autoregressive import AutoregressiveDecoder
from lp.engine.decoder import Decoder
from lp.errors import UserError
from lp.parallel.context import ParallelContext

from .registry import BaselineOptions, needs_package, register_baseline
from .weights import with_shared_weights


def missing(options: BaselineOptions) -> str | None:
    """What a pipeline lacks here: two GPUs, or the package."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return f"spreads layers over GPUs and needs two; torch sees {gpus}: leave it out here"
    return needs_package("accelerate", "accelerate")(options)


@register_baseline("accelerate_pp", missing=missing)
def build(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    """Plain decoding by a copy of the model with its layers balanced over every GPU that this process sees.

    Raises:
        ValueError: fewer than two GPUs, or no accelerate.
    """
    if lacking := missing(options):
        raise UserError(f"accelerate_pp {lacking}")
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    layers = list(getattr(model, "_no_split_modules", None) or [])
    memory = get_balanced_memory(model, no_split_module_classes=layers, dtype=model.dtype)
    device_map = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=layers, dtype=model.dtype)
    return AutoregressiveDecoder(dispatch_model(with_shared_weights(model), device_map))
