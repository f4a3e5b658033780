"""Save a Llama as a GGUF file, in float32 and without its tokenizer, for methods=[llama_cpp] of `lp benchmark`.

    python -m launch.bench.to_gguf demo demo.gguf      # or a folder, or a hub name

For models of other architectures use llama.cpp's convert_hf_to_gguf.py. Needs the package gguf (pip install gguf).
"""

from __future__ import annotations

import argparse

import torch
from transformers import PreTrainedModel

from lp.errors import UserError
from lp.models.loader import load
from lp.optional import is_installed

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder a query or key projection's rows from transformers' rotary layout to GGML's.

    Rotary embeddings turn rows in pairs. In transformers the two rows of a pair are half a head apart; in GGML they are
    adjacent.

    Args:
        weight: (heads x head_dim, hidden).
        num_heads: heads of the projection.
    """
    halves = weight.view(num_heads, 2, -1, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A Llama's weights under the names that GGUF gives them.

    Args:
        model: an HF causal LM.

    Raises:
        UserError: the model is no Llama, or has biases or scaled rotary frequencies.
    """
    config = model.config
    weights = model.state_dict()
    if config.model_type != "llama" or any(name.endswith(".bias") for name in weights):
        raise UserError(f"a {config.model_type} model; this script knows a Llama without biases: use llama.cpp's own")
    if config.rope_parameters["rope_type"] != "default":
        raise UserError(
            f"rope_type is {config.rope_parameters['rope_type']!r}, not 'default'; use llama.cpp's own script"
        )
    named = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        named["output.weight"] = weights["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        for ours, theirs in LAYER.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs == "attn_q":
                weight = interleaved(weight, config.num_attention_heads)
            if theirs == "attn_k":
                weight = interleaved(weight, config.num_key_value_heads)
            named[f"blk.{layer}.{theirs}.weight"] = weight
    return named


def write_gguf(model: PreTrainedModel, path: str) -> None:
    """Write a Llama's weights to a GGUF file, in float32.

    Args:
        model: an HF causal LM.
        path: the file to write.

    Raises:
        UserError: the model is no Llama, or has biases or scaled rotary frequencies.
    """
    import gguf

    tensors = tensors_of(model)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")  # methods get token ids
    for name, weight in tensors.items():
        writer.add_tensor(name, weight.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Save a model as GGUF: `python -m launch.bench.to_gguf MODEL FILE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, hub name or demo")
    parser.add_argument("gguf", help="the file to write")
    args = parser.parse_args()
    if not is_installed("gguf"):
        parser.error("needs the package gguf; pip install gguf")
    try:
        write_gguf(load(args.model, "float32", "cpu").model, args.gguf)
    except UserError as error:
        parser.error(str(error))
    print(f"wrote {args.gguf}")


if __name__ == "__main__":
    main()
