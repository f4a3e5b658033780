"""Refuse models and adapters with which a tree-shaped decode step can't be exact, by looking at their config alone.

Models that are not refused here are checked by running them on a few tokens (`lp.models.probe`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers as tf

from lp.attention.masks import layer_kinds, named_kinds
from lp.config import KVDtype
from lp.errors import UserError
from lp.models.quantisation import inexact_quantisation
from lp.models.recurrent_layers import LAYERS, MODEL_TYPES, RECURRENT_KINDS, TRANSFORMERS_KEEPS_STATES

# Recurrent models whose config names no kinds of layers.
RECURRENT = {"rwkv", "xlstm"}
# Mamba-1, whose states decay by a factor of their own for every channel and state: no sum of outer products under one
# decay a head, so that a step would hold a state for every node.
MAMBA_1 = {"mamba", "falcon_mamba", "jamba", "zamba"}
# Of float32 products, by torch.get_float32_matmul_precision(): float32's own, TF32's, bfloat16's.
FLOAT32_PRECISION = {"highest": 2.0**-23, "high": 2.0**-10, "medium": 2.0**-7}
# Of quantised keys and values: the step between two numbers, of the largest in a row, or of the number itself.
KV_PRECISION = {KVDtype.AUTO: 0.0, KVDtype.INT8: 2.0**-7, KVDtype.FP8: torch.finfo(torch.float8_e4m3fn).eps}


def check_supported(config: Any) -> None:
    """Refuse, by its config, a model for which a tree-shaped decode step cannot give plain decoding's tokens.

    Args:
        config: the model's config.

    Raises:
        ValueError: the model is refused; names the architecture, why, and the remedy.
    """
    kind = getattr(config, "model_type", "unknown")
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model type {kind!r} is an encoder-decoder; lookahead decoding needs a causal LM")
    attention = getattr(config, "attn_config", None)  # of MPT
    alibi = kind == "bloom" or getattr(config, "alibi", False) or getattr(attention, "alibi", False)
    if alibi or kind == "roformer":
        obstacle = "alibi" if alibi else "no position_ids"
        raise UserError(
            f"model type {kind!r} uses {obstacle}, which ties attention to a token's cache slot; "
            "a step of several branches can't be exact: use a model with rotary or learned positions"
        )
    if kind in RECURRENT:
        raise UserError(f"model type {kind!r} keeps a recurrent state, which holds one branch only; use a transformer")
    text = config.get_text_config()
    if text.model_type in MAMBA_1:
        raise UserError(
            f"model type {kind!r} has Mamba-1 layers, whose state decays by its own factor in every channel and state; "
            "a step would hold a state for every node: use a model with Mamba-2 layers, or decode it with "
            "AutoregressiveDecoder"
        )
    if any(each in RECURRENT_KINDS for each in named_kinds(text)) and text.model_type not in MODEL_TYPES:
        raise UserError(
            f"model type {kind!r} has recurrent layers that lp can't run over a tree; "
            f"it can those of {', '.join(sorted({name for name, _ in LAYERS}))}: decode it with AutoregressiveDecoder"
        )
    if text.model_type in MODEL_TYPES and not TRANSFORMERS_KEEPS_STATES:
        raise UserError(
            f"model type {kind!r} has recurrent layers, which need transformers 5.21 or newer; {tf.__version__} is "
            "installed: upgrade it, or decode the model with AutoregressiveDecoder"
        )
    layer_kinds(text)
    strongest = getattr(text, "keep_window_size", None)
    context = getattr(text, "max_position_embeddings", None)
    if strongest is not None and context is not None and strongest < context:  # Doge
        raise UserError(
            f"model type {kind!r} attends to the {strongest} strongest keys of up to {context}, and which of two equal "
            "ones goes by their cache slots; a step of several branches can't be exact: "
            f"set max_position_embeddings to {strongest}, or decode it with AutoregressiveDecoder"
        )


def check_adapter(model: Any) -> None:
    """Refuse a PEFT adapter that needs inputs of its own, such as virtual tokens: lp passes token ids alone.

    Args:
        model: a model, with or without adapters.

    Raises:
        ValueError: an adapter is refused; names the kind of adapter, why, and the remedy.
    """
    active = getattr(model, "active_peft_config", None)  # of PEFT's wrapper; the model inside has those of all adapters
    configs = getattr(model, "peft_config", None) if active is None else {"": active}
    for config in configs.values() if isinstance(configs, dict) else ():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning:
            effect = f"{kind}, which puts virtual tokens or their KV before the prompt"
        elif getattr(config, "alora_invocation_tokens", None):
            effect = f"an activated {kind} (alora_invocation_tokens), which applies to some tokens of a pass by index"
        else:
            continue
        raise UserError(
            f"the model has an adapter that is {effect}; lp passes the tokens alone: use generate as it is, or an "
            "adapter of the weights, such as LoRA"
        )


def logit_rounding(model: Any, kv_dtype: KVDtype = KVDtype.AUTO) -> float:
    """The most by which a token's logits differ with the tokens beside it in a pass, as a share of the largest logit.

    Ranks that compare their logits allow for this difference: kernels for other numbers of tokens round differently. It
    is the square root of the relative precision that the model computes in, about 3e-4 in float32, 0.03 in float16 and
    0.09 in bfloat16. Measured on a trained model of 30 layers, passes of one and of eight tokens differ by 3e-6, 0.001
    and 0.01. Float64 counts as float32, since transformers' norms and softmax compute in float32 at most.

    A mixture of experts counts as bfloat16, or worse, since its router may take either of two experts that are equally
    good. A quantised cache counts with its own precision, since a key between two of its numbers may be stored as
    either. Where activations are quantised, there is no bound.

    Args:
        model: a causal LM.
        kv_dtype: dtype in which its cache stores keys and values.

    Returns:
        The share, such as 0.09; infinite where there is no bound.
    """
    if inexact_quantisation(model):
        return math.inf
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    precision = max(torch.finfo(dtype).eps for dtype in (*dtypes, torch.float32))
    if dtypes == {torch.float32}:
        precision = float32_precision()
    if any("expert" in name for name in vars(model.config.get_text_config()) if not name.startswith("_")):
        precision = max(precision, torch.finfo(torch.bfloat16).eps)
    precision = max(precision, KV_PRECISION[kv_dtype])
    return math.sqrt(precision)


def float32_precision() -> float:
    """Relative precision of float32 matrix products, as torch is set to compute them (TF32 or bfloat16, if allowed).

    It is the step between neighbouring numbers, twice the largest rounding error: 2^-23 for full float32.
    """
    try:
        return FLOAT32_PRECISION[torch.get_float32_matmul_precision()]
    except RuntimeError:  # set by torch.backends' own switches, which this call does not read
        return FLOAT32_PRECISION["medium"]
