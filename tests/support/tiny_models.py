"""Tiny random models of many architectures, sharp enough that greedy text is not one token for ever, and prompts."""

from __future__ import annotations

import inspect
import itertools
import random
from functools import cache
from typing import Any

import pytest
import tokenizers
import torch
import transformers as tf
from transformers import PreTrainedModel

import lp
from lp.models.recurrent_layers import MODEL_TYPES, TRANSFORMERS_KEEPS_STATES

VOCABULARY = 61
CONTEXT = 512
SLIDING_WINDOW = 16
CLOSE = 1e-3  # of logits that may have been rounded to float32
BOUNDARY = 48  # of the rotary scalings that look at the largest position
# Earlier releases recompute the cache there with the newest token alone.
LOSES_THE_PROMPT = "next_sequence_length" not in inspect.getsource(tf.Phi3ForCausalLM.prepare_inputs_for_generation)

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
    "tie_word_embeddings": False,  # tied ones repeat their input
}
_NAMED_OTHERWISE = ("intermediate_size", "num_key_value_heads")
_SIZES: dict[str, Any] = {key: value for key, value in _BASE.items() if key != "attention_dropout"}
_OLD_BASE: dict[str, Any] = {key: value for key, value in _BASE.items() if key not in _NAMED_OTHERWISE}
_MIXED: dict[str, Any] = {
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_MIXED_TWICE: dict[str, Any] = _MIXED | {"layer_types": _MIXED["layer_types"] * 2, "num_hidden_layers": 4}
_PER_LAYER: dict[str, Any] = {
    "head_dim": 8,
    "num_kv_shared_layers": 2,  # which keep no KV of their own
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_FALCON: dict[str, Any] = {"ffn_hidden_size": 48}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Sizes of a recurrent layer, small and all different: H = 4 heads that share 2 keys, or 2 groups.
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}


def _rope(rope_type: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0} | fields}


_LONG_FACTORS: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": BOUNDARY}

# Name -> transformers' config class and what it takes beyond a base of sizes.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _BASE),
    "llama_linear": ("LlamaConfig", _BASE | _rope("linear", factor=4.0)),
    "llama_llama3": ("LlamaConfig", _BASE | _rope("llama3", factor=8.0, **_LLAMA3)),
    "llama_yarn": ("LlamaConfig", _BASE | _rope("yarn", factor=4.0, original_max_position_embeddings=BOUNDARY)),
    "llama_dynamic": ("LlamaConfig", _BASE | {"max_position_embeddings": BOUNDARY} | _rope("dynamic", factor=8.0)),
    "llama_longrope": (
        "LlamaConfig",
        _BASE | _rope("longrope", **_LONG_FACTORS, original_max_position_embeddings=BOUNDARY),
    ),
    "mistral": ("MistralConfig", _BASE | {"sliding_window": None}),
    "mistral_sliding": ("MistralConfig", _BASE | {"sliding_window": SLIDING_WINDOW}),
    "mixtral": ("MixtralConfig", _BASE | {"num_local_experts": 4}),
    "qwen2": ("Qwen2Config", _BASE),
    "qwen2_sliding": (
        "Qwen2Config",
        _BASE | {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", _BASE | {"head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", _BASE | _EXPERTS | {"head_dim": 8, "num_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", _BASE | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24}),
    "gemma": ("GemmaConfig", _BASE | {"head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        _BASE | _MIXED | {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": ("Gemma3TextConfig", _BASE | _MIXED | {"head_dim": 8}),
    "gemma3n": ("Gemma3nTextConfig", _BASE | _MIXED_TWICE | _PER_LAYER | {"activation_sparsity_pattern": [0.0] * 4}),
    "gemma4": ("Gemma4TextConfig", _BASE | _MIXED_TWICE | _PER_LAYER | {"global_head_dim": 8}),
    "phi": ("PhiConfig", _BASE),
    "phi3": ("Phi3Config", _BASE | {"sliding_window": None, "pad_token_id": 0}),
    "phi3_sliding": ("Phi3Config", _BASE | {"sliding_window": SLIDING_WINDOW, "pad_token_id": 0}),
    "phi3_longrope": (
        "Phi3Config",
        _BASE | _rope("longrope", **_LONG_FACTORS) | {"pad_token_id": 0, "original_max_position_embeddings": BOUNDARY},
    ),
    "cohere2": ("Cohere2Config", _BASE | _MIXED),
    "granite": ("GraniteConfig", _BASE),
    "smollm3": ("SmolLM3Config", _BASE),
    "stablelm": ("StableLmConfig", _BASE),
    "glm4": ("Glm4Config", _BASE | {"head_dim": 8}),
    "gpt_neox": ("GPTNeoXConfig", _BASE),
    "gpt2": ("GPT2Config", _OLD_BASE | {"n_inner": 48}),
    "gptj": ("GPTJConfig", _OLD_BASE | {"n_inner": 48, "rotary_dim": 8}),
    "gpt_bigcode": ("GPTBigCodeConfig", _OLD_BASE | {"n_inner": 48}),
    "opt": ("OPTConfig", _OLD_BASE | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "olmo2": ("Olmo2Config", _BASE),
    "olmo3": ("Olmo3Config", _BASE | _MIXED),
    "starcoder2": ("Starcoder2Config", _BASE | {"sliding_window": SLIDING_WINDOW}),
    "falcon": ("FalconConfig", _OLD_BASE | _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_oss": ("GptOssConfig", _BASE | _MIXED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2Config", _BASE | _EXPERTS | _MLA),
    "deepseek_v3": ("DeepseekV3Config", _BASE | _EXPERTS | _MLA),
    "qwen3_next": ("Qwen3NextConfig", _BASE | _EXPERTS | _DELTA | {"num_experts": 4, "head_dim": 8}),
    "qwen3_5": ("Qwen3_5TextConfig", _BASE | _DELTA | {"head_dim": 8}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _BASE | _EXPERTS | _DELTA | {"head_dim": 8, "num_experts": 4}),
    "olmo_hybrid": ("OlmoHybridConfig", _BASE | _DELTA),
    "bamba": ("BambaConfig", _BASE | _MAMBA2 | {"attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        _BASE
        | _MAMBA2
        | {"layer_types": _DELTA["layer_types"], "num_local_experts": 4, "shared_intermediate_size": 24},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        _SIZES
        | {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 6,
            "n_groups": 2,
            "chunk_size": 16,
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        _BASE
        | {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_mem_blocks": 1,
            "num_key_value_heads": 4,
            "mamba_ngroups": 2,
            "mamba_d_state": 6,
            "n_mamba_heads": 8,
            "chunk_size": 16,
            "adapter_rank": 4,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        },
    ),
    "falcon_h1": ("FalconH1Config", _BASE | _MAMBA2 | {"mamba_d_ssm": 64}),
    "falcon_h1_norm": ("FalconH1Config", _BASE | _MAMBA2 | {"mamba_d_ssm": 64, "mamba_rms_norm": True}),
    "mamba2": (
        "Mamba2Config",
        _SIZES | {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 16},
    ),
    "lfm2": ("Lfm2Config", _BASE | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        _BASE | _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1},
    ),
    "llama4": (
        "Llama4TextConfig",
        _BASE
        | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "attention_chunk_size": 12}
        | {"floor_scale": 8, "attn_scale": 0.7, "intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 8},
    ),
    # Refused.
    "bloom": ("BloomConfig", _OLD_BASE),
    "falcon_alibi": ("FalconConfig", _OLD_BASE | _FALCON | {"alibi": True}),
    "roformer": ("RoFormerConfig", _OLD_BASE | {"intermediate_size": 48, "is_decoder": True}),
    "rwkv": ("RwkvConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}),
    "gpt_neo": ("GPTNeoConfig", _OLD_BASE | {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}),
    "mpt": ("MptConfig", {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2}),
    "t5": ("T5Config", {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 48, "num_layers": 1, "num_heads": 4}),
    "mamba": ("MambaConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}),
}
MATRIX = [arch for arch, (name, _) in _CONFIGS.items() if hasattr(tf, name)]  # not every release has them all
# Those over which the other tests draw.
ARCHITECTURES = ["gemma3", "gpt_neox", "llama", "mistral", "mistral_sliding", "phi3", "qwen2", "qwen3"]


def tiny_config(arch: str, **overrides: Any) -> Any:
    """The config of one of MATRIX, with some fields changed."""
    name, fields = _CONFIGS[arch]
    return getattr(tf, name)(**fields | overrides)


def runs_here(arch: str) -> bool:
    """Whether the installed release of transformers has what lp needs for an architecture's recurrent layers."""
    return TRANSFORMERS_KEEPS_STATES or tiny_config(arch).get_text_config().model_type not in MODEL_TYPES


def tiny_model(
    arch: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    sharpness: float = 3.0,
    attention: str | None = None,
    recency: float = 0.0,
    **overrides: Any,
) -> PreTrainedModel:
    """A random causal LM on the CPU, in eval mode, without EOS.

    Args:
        arch: name of the architecture, one of MATRIX.
        seed: seed that the weights are drawn with.
        dtype: type of the weights; float64 leaves no near-ties.
        sharpness: factor on the matrices; random weights as they come give one token for ever.
        attention: transformers' name of the attention implementation; None takes the model's own.
        recency: bias of all queries and keys, where they have one: rotated, it makes rows look at those right before
            them. Without it each of a thousand rows counts for a thousandth, and so does a fault in one of them.
        overrides: fields of the config that differ from the tiny ones.

    A test that asks for recurrent layers is skipped with a release of transformers that can't run them.
    """
    if not runs_here(arch):
        pytest.skip(f"{arch} has recurrent layers, which need transformers 5.21 or newer")
    if arch == "gemma2":  # before 5.21 transformers gives it sdpa, which leaves out the cap of its scores
        attention = attention or "eager"
    model = sharpened(tiny_config(arch, **overrides), seed, dtype, sharpness, attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if recency and name.endswith(("q_proj.bias", "k_proj.bias")):
                parameter.fill_(recency)
            if name.endswith(".sinks"):  # as they come, all heads have almost the same
                parameter.copy_(torch.linspace(-3, 3, len(parameter)))
    return model


def drawn_weights(seed: int, dtype: torch.dtype, arch: str = "llama") -> PreTrainedModel:
    """A model of eight layers with drawn sharpness, and outliers as trained models have them: some channels of the
    embeddings, of norms and of what layers add are up to a hundred times as large as the others.
    """
    rng = random.Random(seed)
    model = tiny_model(arch, seed, torch.float32, sharpness=rng.uniform(1, 6), num_hidden_layers=8)
    channels = rng.sample(range(32), rng.randint(0, 3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if channels and name.endswith(("embed_tokens.weight", "norm.weight")):
                parameter[..., channels] *= 10 ** rng.uniform(0, 2)
            elif channels and name.endswith(("down_proj.weight", "o_proj.weight")) and rng.random() < 0.2:
                parameter[channels] *= 10 ** rng.uniform(0, 2)
    return model.to(dtype)


def sharpened(
    config: Any, seed: int, dtype: torch.dtype, sharpness: float = 3.0, attention: str | None = None
) -> PreTrainedModel:
    """A random causal LM of this config, as `tiny_model` gives it."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(
        config,
        experts_implementation="eager",  # the default has no float64
        attn_implementation=attention,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(sharpness)
    model.generation_config = tf.GenerationConfig(do_sample=False)
    return model.to(dtype).eval()


def plain_greedy(model: PreTrainedModel, ids: list[int], max_new_tokens: int, **kwargs: Any) -> list[int]:
    """transformers' own greedy tokens; the mask is given, since `generate` would mask tokens equal to its pad.

    A test of Phi-3 with two sets of rotary frequencies is skipped where transformers loses the prompt between them.
    """
    if LOSES_THE_PROMPT and model.config.model_type == "phi3" and "longrope" in str(model.config.rope_parameters):
        pytest.skip("this release of transformers loses Phi-3's prompt where its rotary frequencies change")
    prompt = torch.tensor([ids])
    kwargs = {"pad_token_id": 0, "do_sample": False} | kwargs
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, **kwargs)
    return out[0, len(ids) :].tolist()


def logits_differ(output: lp.GenerationOutput, oracle: lp.GenerationOutput) -> bool:
    """Whether two texts' logits differ by more than CLOSE of their spread; never where none were kept."""
    if output.logits is None or oracle.logits is None:
        return False
    difference = (output.logits - oracle.logits).nan_to_num(0.0).abs().max()  # of infinite ones 0
    return bool(difference > CLOSE * oracle.logits.std().clamp(min=1e-9))


def drawn_text(rng: random.Random, length: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Random tokens with repeats, so that the pool finds something."""
    ids: list[int] = []
    while len(ids) < length:
        again = ids and rng.random() < 0.5
        start = rng.randrange(len(ids)) if again else 0
        ids += ids[start : start + rng.randint(1, 8)] if again else [rng.randrange(vocabulary)]
    return ids[:length]


@cache
def letters(vocabulary: int) -> tf.PreTrainedTokenizerFast:
    """A tokenizer whose tokens are runs of a few letters, the first ones single."""
    runs = ("".join(run) for n in itertools.count(2) for run in itertools.product("abc", repeat=n))
    words = [*"abcdef", *itertools.islice(runs, max(vocabulary - 6, 0))]
    model = tokenizers.models.BPE({word: index for index, word in enumerate(words)}, [])
    made = tokenizers.Tokenizer(model)
    made.decoder = tokenizers.decoders.Fuse()
    return tf.PreTrainedTokenizerFast(tokenizer_object=made)
