"""Tiny random models of many architectures, sharp enough that greedy text is not one token for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

VOCABULARY = 61
CONTEXT = 512

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attention_dropout": 0.0,
}

_CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **kw: tf.LlamaConfig(**_BASE | kw),
    "qwen2": lambda **kw: tf.Qwen2Config(**_BASE | kw),
    "qwen3": lambda **kw: tf.Qwen3Config(**_BASE | {"head_dim": 8} | kw),
    "mistral": lambda **kw: tf.MistralConfig(**_BASE | {"sliding_window": None} | kw),
    "mistral_sliding": lambda **kw: tf.MistralConfig(**_BASE | {"sliding_window": 16} | kw),
    "phi3": lambda **kw: tf.Phi3Config(**_BASE | {"sliding_window": None, "pad_token_id": 0} | kw),
    "gpt_neox": lambda **kw: tf.GPTNeoXConfig(**_BASE | kw),
    "gemma3": lambda **kw: tf.Gemma3TextConfig(
        **_BASE | {"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]} | kw
    ),
}
ARCHITECTURES = sorted(_CONFIGS)


def tiny_model(
    arch: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, sharpness: float = 3.0, **overrides: Any
) -> PreTrainedModel:
    """A random causal LM on the CPU, in eval mode, without EOS.

    Args:
        arch: one of ARCHITECTURES.
        seed: of the weights.
        dtype: float64 leaves no near-ties.
        sharpness: factor on the matrices; random weights as they come give one token for ever.
        overrides: config fields.
    """
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(_CONFIGS[arch](**overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(sharpness)
    model.generation_config = tf.GenerationConfig(do_sample=False)
    return model.to(dtype).eval()


def plain_greedy(model: PreTrainedModel, ids: list[int], max_new_tokens: int, **kwargs: Any) -> list[int]:
    """transformers' own greedy tokens; the mask is given, since `generate` would mask tokens equal to its pad."""
    prompt = torch.tensor([ids])
    kwargs = {"pad_token_id": 0, "do_sample": False} | kwargs
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, **kwargs)
    return out[0, len(ids) :].tolist()
