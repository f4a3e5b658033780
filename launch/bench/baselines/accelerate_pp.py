"""Baseline: accelerate's pipeline, which spreads layers over this process' GPUs; the GPUs work one after the other."""

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
    """Reason why the baseline accelerate_pp cannot run here, with the remedy; None if it can run.

    It needs at least two GPUs, and the package accelerate.

    Args:
        options: options of the benchmark; none is used.
    """
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return f"spreads layers over GPUs and needs two; torch sees {gpus}: leave it out here"
    return needs_package("accelerate", "accelerate")(options)


@register_baseline("accelerate_pp", missing=missing)
def build(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    """Build a decoder for plain decoding whose model has its layers spread evenly over all GPUs that this process sees.

    Args:
        model: an HF causal LM; the decoder gets a copy, which shares the weights where possible.
        context: this rank's context; not used.
        options: options of the benchmark; none is used.

    Raises:
        ValueError: less than two GPUs, or accelerate is not installed.
    """
    if lacking := missing(options):
        raise UserError(f"accelerate_pp {lacking}")
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    layers = list(getattr(model, "_no_split_modules", None) or [])
    memory = get_balanced_memory(model, no_split_module_classes=layers, dtype=model.dtype)
    device_map = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=layers, dtype=model.dtype)
    return AutoregressiveDecoder(dispatch_model(with_shared_weights(model), device_map))
