"""Baseline: DeepSpeed's automatic tensor parallelism (AutoTP), which the paper compares with."""

from __future__ import annotations

import contextlib
import io
import os

from transformers import PreTrainedModel

from lp.engine.autoregressive import AutoregressiveDecoder
from lp.engine.decoder import Decoder
from lp.errors import UserError
from lp.parallel.context import ParallelContext

from .registry import BaselineOptions, needs_package, register_baseline
from .weights import with_shared_weights


@register_baseline("deepspeed_tp", all_ranks=True, missing=needs_package("deepspeed", "deepspeed"))
def build(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    """Build a decoder for plain decoding with a model that DeepSpeed splits over all ranks; every rank calls this.

    Args:
        model: an HF causal LM, which is copied.
        context: this rank's context, with at least two ranks.
        options: options of the benchmark; none is used.

    Raises:
        ValueError: a single rank, DeepSpeed is not installed, or a dtype that DeepSpeed refuses on this device.
    """
    if context.world_size == 1:
        raise UserError("deepspeed_tp splits a model over ranks, and there is one; launch with NPROC=2 or more")
    if model.device.type == "cpu" and str(model.dtype) not in ("torch.float32", "torch.bfloat16"):
        raise UserError(f"model.dtype is {model.dtype}, which DeepSpeed refuses on a CPU; use float32 or bfloat16")
    # Its shared-memory kernel reads this variable and crashes without it.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", str(context.world_size)))
    with contextlib.redirect_stdout(io.StringIO()):  # it reports to stdout, which may carry our JSON
        try:
            import deepspeed
        except ImportError:
            raise UserError("deepspeed_tp needs the package deepspeed; pip install deepspeed") from None
        engine = deepspeed.init_inference(
            with_shared_weights(model),
            tensor_parallel={"tp_size": context.world_size},
            dtype=model.dtype,
            replace_with_kernel_inject=False,
        )
    return AutoregressiveDecoder(engine.module, context)
