"""How the decoder layers of transformers' architectures differ from Llama's, for `lp.models.fused` to rebuild them.

An architecture is recognised by the exact classes of its modules. A class that a user wrote, or that a library has put
in the place of transformers' own, is not recognised: its layers run unfused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lp.models.skipped_layer import SkippedLayer


class NormRule(Enum):
    """Where an RMS norm rounds from float32 to the model's dtype: before or after it multiplies by the weight.

    ROUNDED: before. WIDE: after. OFFSET: after, and it multiplies by 1 + weight. The division by the root mean square
    is always computed in float32.
    """

    ROUNDED = auto()  # before the product with the weight
    WIDE = auto()  # after it
    OFFSET = auto()  # after it; the factor is 1 + weight


@dataclass(frozen=True)
class Architecture:
    """How the decoder layers of one architecture differ from Llama's.

    Biases, and norms of queries and keys, are not listed here: they are looked up on the modules themselves.

    Attributes:
        prefix: start of transformers' class names, such as "Llama" in LlamaForCausalLM and LlamaDecoderLayer.
        base: how the decoder's class name continues after the prefix, such as "Model" in LlamaModel.
        norm: where all RMS norms of the architecture round to the model's dtype.
        attention_norms, mlp_norms: names of the norm before and the norm after attention, or the MLP; None in the place
            of a norm that the architecture does not have.
        window: where the size of the sliding window is looked up that the attention function gets: "attention" (on the
            attention module) or "config"; None: the function gets no window.
        softcap: whether the attention function gets a cap of the attention scores.
        rotary_by_kind: whether sliding-window and full-attention layers have different rotary frequencies.
        multipliers: whether the config has factors that embeddings, residuals and logits are scaled by, as Granite's.
        capped_logits: whether the config may cap the logits (`final_logit_softcapping`).
    """

    prefix: str
    base: str = "Model"
    norm: NormRule = NormRule.ROUNDED
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None)
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None)
    window: str | None = None
    softcap: bool = False
    rotary_by_kind: bool = False
    multipliers: bool = False
    capped_logits: bool = False


_AFTER: dict[str, Any] = {
    "attention_norms": (None, "post_attention_layernorm"),
    "mlp_norms": (None, "post_feedforward_layernorm"),
}
_AROUND: dict[str, Any] = {
    "attention_norms": ("input_layernorm", "post_attention_layernorm"),
    "mlp_norms": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}

# By the name of transformers' module.
ARCHITECTURES = {
    "llama": Architecture("Llama"),
    "mistral": Architecture("Mistral", window="config"),
    "mixtral": Architecture("Mixtral", window="config"),
    "phi3": Architecture("Phi3", window="config"),
    "qwen2": Architecture("Qwen2", window="attention"),
    "qwen2_moe": Architecture("Qwen2Moe"),
    "qwen3": Architecture("Qwen3", window="attention"),
    "qwen3_moe": Architecture("Qwen3Moe", window="attention"),
    "smollm3": Architecture("SmolLM3", window="attention"),
    "granite": Architecture("Granite", multipliers=True),
    "olmo2": Architecture("Olmo2", norm=NormRule.WIDE, **_AFTER),
    "olmo3": Architecture("Olmo3", norm=NormRule.WIDE, **_AFTER, window="attention", rotary_by_kind=True),
    "gemma": Architecture("Gemma", norm=NormRule.OFFSET),
    "gemma2": Architecture(
        "Gemma2", norm=NormRule.OFFSET, **_AROUND, window="attention", softcap=True, capped_logits=True
    ),
    "gemma3": Architecture(
        "Gemma3", "TextModel", NormRule.OFFSET, **_AROUND, window="attention", rotary_by_kind=True, capped_logits=True
    ),
}

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of a module, by call
_DROPOUTS = {"resid_attn_dropout", "resid_mlp_dropout"}  # of Phi3, nothing in eval mode
_QK_NORMS = {"q_norm", "k_norm"}
_ATTENTIONS = [{"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"}]
_MLPS = [{"gate_proj", "up_proj", "down_proj", "act_fn"}, {"gate_up_proj", "down_proj", "activation_fn"}]


class Unknown(Exception):
    """Raised where some part of a model is not exactly transformers' own, so that its layers cannot be fused.

    The message names the part.
    """


def architecture_of(model: PreTrainedModel) -> Architecture:
    """Recognise the architecture of a causal LM, before its layers are fused.

    Every part that fusing would replace must be exactly transformers' own.

    Args:
        model: the causal LM.

    Raises:
        Unknown: a part has another class or other child modules, has a hook, or is in training mode; the message names
            it.
    """
    path = type(model).__module__
    name = path.rpartition(".modeling_")[2]
    if name not in ARCHITECTURES or path != f"transformers.models.{name}.modeling_{name}":
        raise Unknown(f"{type(model).__name__} is none of {', '.join(sorted(ARCHITECTURES))}")
    architecture = ARCHITECTURES[name]
    _check(model, path, architecture.prefix + "ForCausalLM", {"model", "lm_head"})
    _check(model.model, path, architecture.prefix + architecture.base, {"embed_tokens", "layers", "norm", "rotary_emb"})
    norms = [model.model.norm]
    layers = running(model.model.layers)
    for layer in layers:
        named = {name for name in (*architecture.attention_norms, *architecture.mlp_norms) if name is not None}
        children = {"self_attn", "mlp"} | named
        _check(layer, path, architecture.prefix + "DecoderLayer", children, children | _DROPOUTS)
        attention = layer.self_attn
        projections = next((names for names in _ATTENTIONS if names <= set(attention._modules)), _ATTENTIONS[0])
        _check(attention, path, architecture.prefix + "Attention", projections, projections | _QK_NORMS)
        if attention.config is not model.config:
            raise Unknown("its layers have a config of their own")
        norms += [layer._modules[name] for name in named]
        norms += [attention._modules[name] for name in _QK_NORMS & set(attention._modules)]
    head_dims = {layer.self_attn.head_dim for layer in layers}
    if any(head_dims != {2 * len(frequencies)} for frequencies in model.model.rotary_emb.buffers()):
        raise Unknown("rotary positions turn a part of each head")
    for norm in norms:
        _check(norm, path, architecture.prefix + "RMSNorm", set())
    return architecture


def running(layers: Iterable[Any]) -> list[Any]:
    """List the decoder layers that a view of the model runs, without those that the view skips (`SkippedLayer`)."""
    return [layer for layer in layers if not isinstance(layer, SkippedLayer)]


def is_plain_mlp(mlp: nn.Module, prefix: str) -> bool:
    """Whether an MLP is transformers' own and computes down(activation(gate) x up), so that it can be fused.

    Args:
        mlp: the MLP of a decoder layer.
        prefix: start of the architecture's class names, such as "Llama".
    """
    try:
        _check(mlp, mlp.__class__.__module__, prefix + "MLP", set(mlp._modules))
    except Unknown:
        return False
    return set(mlp._modules) in _MLPS


def _check(module: nn.Module, path: str, name: str, children: set[str], allowed: Iterable[str] | None = None) -> None:
    """Refuse a module that is not of transformers' own class of this name, or that does more than its class does."""
    found = type(module)
    own = found.__dict__.get("forward")
    if getattr(sys.modules.get(path), name, None) is not found or getattr(own, "__module__", None) != path:
        raise Unknown(f"{found.__name__} is not transformers' {name}")
    if not children <= set(module._modules) <= set(children if allowed is None else allowed):
        raise Unknown(f"its {name} has {', '.join(sorted(module._modules))}")
    check_unhooked(module)


def is_unhooked(module: nn.Module) -> bool:
    """Whether calling a module runs its class's `forward` in eval mode and nothing else, so that it can be fused."""
    state = vars(module)
    return not (module.training or "forward" in state or any(state[name] for name in HOOKS))


def check_unhooked(module: nn.Module) -> None:
    """Refuse a module whose call does more than its class's `forward`, since fused layers would leave out the rest.

    Raises:
        Unknown: the module has a hook or a `forward` of its own, or is in training mode.
    """
    if not is_unhooked(module):
        raise Unknown(f"a {type(module).__name__} is trained, has a hook, or a forward of its own")
