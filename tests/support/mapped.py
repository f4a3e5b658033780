"""Every causal LM type that transformers maps, at a tiny size: exact, refused by name, or not built and why."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lp
from lp.models.support import check_supported
from tests.support.architectures import PAGE, versions
from tests.support.tiny_models import (
    CONTEXT,
    MATRIX,
    SLIDING_WINDOW,
    VOCABULARY,
    drawn_text,
    logits_differ,
    plain_greedy,
    sharpened,
    tiny_config,
)

MAPPED = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
EXACT, REFUSED, NOT_BUILT, WRONG = "exact", "refused", "not built", "WRONG"
SHAPE = lp.LookaheadConfig(window_size=5, ngram_size=3, guess_set_size=5)
PROMPTS, NEW = 3, 30
START, END = "<!-- mapped -->\n", "<!-- end of mapped -->\n"


def _all(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# By every name that a config may have for it.
_SIZES: dict[str, Any] = {
    **_all(VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    **_all(32, "hidden_size d_model n_embd embedding_size word_embed_proj_dim lru_width"),
    **_all(48, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size n_inner dff dim_ff"),
    **_all(48, "intermediate_size_mlp dense_intermediate_size feed_forward_size"),
    **_all(24, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size"),
    **_all(24, "shared_experts_intermediate_size moe_shared_expert_intermediate_size"),
    **_all(2, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
    **_all(2, "num_decoder_layers num_encoder_layers"),
    **_all(4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    **_all(4, "num_decoder_attention_heads num_encoder_attention_heads"),
    **_all(2, "num_key_value_heads num_kv_heads kv_n_heads"),
    **_all(8, "head_dim global_head_dim attention_head_dim attention_head_size dim_head kv_channels swa_head_dim"),
    **_all(8, "v_head_dim qk_rope_head_dim qk_nope_head_dim hidden_size_per_layer_input rotary_dim"),
    **_all(16, "qk_head_dim kv_lora_rank q_lora_rank"),
    **_all(SLIDING_WINDOW, "sliding_window attention_window_size sliding_window_size window_size"),
    **_all(4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    **_all(2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k"),
    **_all(1, "n_group topk_group first_k_dense_replace n_shared_experts num_shared_experts moe_num_shared_experts"),
    **_all(CONTEXT, "max_position_embeddings n_positions max_seq_len n_ctx"),
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # within the vocabulary
# What one type wants otherwise.
_EXTRA: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 50, "hidden_size_global": 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "doge": {"keep_window_size": CONTEXT},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4": {"text_config": {"pad_token_id": 0}},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "nemotron": {"num_key_value_heads": 2},
    "prophetnet": {"num_hidden_layers": ...},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "xlnet": {"max_position_embeddings": ...},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
_SINGLE = {"xglm", "xlnet"}  # whose code has float32 in it


def mapped_config(kind: str) -> Any:
    """The tiny config of a type: by hand in `tests.support.tiny_models`, else its default with every size made small.

    Raises:
        Exception: whatever its class makes of such sizes.
    """
    by_hand = _by_hand().get(kind)
    if by_hand:
        return tiny_config(by_hand)
    made = CONFIG_MAPPING[kind]
    return made(**_small(made(), _EXTRA.get(kind, {})))


@cache
def _by_hand() -> dict[str, str]:
    return {tiny_config(arch).model_type: arch for arch in reversed(MATRIX)}


def _small(default: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Small sizes for what a config has, and one layer of every kind, two at least; `...` leaves a field out."""
    fields = {name: size for name, size in _SIZES.items() if _has(default, name)}
    for name in _TOKENS:
        token = getattr(default, name, None)
        fields[name] = token if token is None or (isinstance(token, int) and 0 <= token < VOCABULARY) else 0
    kinds = [*dict.fromkeys(getattr(default, "layer_types", None) or [])]
    if kinds and _settable(default, "layer_types"):
        fields["layer_types"] = kinds * (2 if len(kinds) == 1 else 1)
        fields["num_hidden_layers"] = len(fields["layer_types"])
    if "kv_lora_rank" in fields:  # latent attention has no groups
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    flags = {"is_decoder": True, "tie_word_embeddings": False}
    fields |= {name: value for name, value in flags.items() if _has(default, name)}
    for name in default.sub_configs:
        inner = getattr(default, name, None)
        if inner is not None:
            by_hand = _by_hand().get(inner.model_type)
            small = tiny_config(by_hand).to_dict() if by_hand else _small(inner, {})
            fields[name] = small | extra.get(name, {})
    fields |= {name: value for name, value in extra.items() if name not in default.sub_configs}
    return {name: value for name, value in fields.items() if value is not ...}


def _has(config: Any, name: str) -> bool:
    """A size of None is derived from others, but for a head's, which some models need."""
    try:
        known = getattr(config, name, None) is not None or (name == "head_dim" and hasattr(config, name))
    except Exception:  # a field that differs by layer, which transformers refuses to name
        return False
    return known and _settable(config, name)


def _settable(config: Any, name: str) -> bool:
    owned = getattr(type(config), (type(config).attribute_map or {}).get(name, name), None)
    return not isinstance(owned, property) or owned.fset is not None


def mapped_model(kind: str, seed: int) -> tf.PreTrainedModel:
    """A random model of the type, as `tiny_model` makes one."""
    return sharpened(mapped_config(kind), seed, torch.float32 if kind in _SINGLE else torch.float64)


@cache
def verdict(kind: str) -> tuple[str, str]:
    """EXACT, REFUSED, NOT_BUILT or WRONG, and why: what its default config says, then what tiny models do."""
    try:
        for make in (CONFIG_MAPPING[kind], lambda: mapped_config(kind)):
            config = make()
            try:
                check_supported(config)
            except ValueError as refusal:
                return _refused(kind, kind, refusal)
        models = [mapped_model(kind, seed) for seed in range(PROMPTS)]
    except Exception as error:  # whatever its class makes of such sizes, or of a package that is missing
        return NOT_BUILT, _line(error)
    for number, model in enumerate(models):
        ids = drawn_text(random.Random(f"{kind}-{number}"), (1, 12, 40)[number])
        try:
            output = lp.LookaheadDecoder(model, SHAPE).generate(ids, NEW, output_logits=True)
        except ValueError as refusal:
            return _refused(kind, type(model).__name__, refusal)
        except Exception as error:
            return WRONG, _line(error)
        plain = plain_greedy(mapped_model(kind, number), ids, NEW)
        if output.tokens != plain:
            return WRONG, f"greedy text of prompt {number}: {output.tokens} against {plain}"
        oracle = lp.AutoregressiveDecoder(mapped_model(kind, number)).generate(ids, NEW, output_logits=True)
        if logits_differ(output, oracle):  # which shows where a tiny model says one token for ever
            return WRONG, f"logits of prompt {number}"
    return EXACT, ""


def _refused(kind: str, name: str, refusal: ValueError) -> tuple[str, str]:
    """A refusal has to name what is refused."""
    return REFUSED if name in str(refusal) or kind in str(refusal) else WRONG, _line(refusal)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    shown = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    return shown if len(shown) <= 240 else shown[:240] + "..."


def mapped_table() -> str:
    """A line for every type, in Markdown."""
    lines = [f"| {kind} | {result} | {why} |" for kind in MAPPED for result, why in [verdict(kind)]]
    return "\n".join(["| model type | result | why |", "|---|---|---|", *lines]) + "\n"


def mapped_page() -> str:
    """docs/reference/models.md: its text as it stands, around a new table of mapped types."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}Run with {versions()}.\n\n{mapped_table()}{END}{after}"


def written() -> dict[str, str]:
    """Type to result, as the page has it; empty where it was made with other versions."""
    text = PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]
    if versions() not in text:
        return {}
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    return {kind.removeprefix("| "): result for kind, result, *_ in cells}
