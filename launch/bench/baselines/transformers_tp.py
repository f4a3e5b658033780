"""Baseline: transformers' own tensor parallelism, which splits a model's matrices by the plan in the model's class."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from lp.engine.autoregressive import AutoregressiveDecoder
from lp.engine.decoder import Decoder
from lp.errors import UserError
from lp.parallel.context import ParallelContext

from .registry import BaselineOptions, register_baseline
from .weights import with_shared_weights


@register_baseline("transformers_tp", all_ranks=True)
def build(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    """Build a decoder for plain decoding with a model that transformers splits over all ranks; every rank calls this.

    Args:
        model: an HF causal LM, which is copied.
        context: this rank's context, with at least two ranks.
        options: options of the benchmark; none is used.

    Raises:
        ValueError: a single rank, a model class without a plan for tensor parallelism, or a release of transformers
            that cannot split a loaded model.
    """
    if context.world_size == 1:
        raise UserError("transformers_tp splits a model over ranks, and there is one; launch with NPROC=2 or more")
    if not model.tp_plan:
        raise UserError(f"{type(model).__name__} brings no plan for tensor parallelism; leave transformers_tp out")
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:
        raise UserError("this release of transformers cannot split a loaded model; use transformers 5.23") from None
    device = "cpu" if context.backend == "gloo" else context.device.type
    mesh = init_device_mesh(device, (context.world_size,), mesh_dim_names=("tp",))
    shard = with_shared_weights(model)
    head, embeddings = shard.get_output_embeddings(), shard.get_input_embeddings()
    if head.weight is embeddings.weight:  # it splits the one and not the other
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    apply_tensor_parallelism(shard, mesh, shard._expand_parallel_plan(shard.tp_plan))
    return AutoregressiveDecoder(shard, context)
