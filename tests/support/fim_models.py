"""Tiny models with the tokens of fill-in-the-middle."""

from __future__ import annotations

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from lp.models.loader import DEMO_MODEL

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


def tokenizer_with(tokens: list[str]) -> PreTrainedTokenizerBase:
    """The demo model's tokenizer with these special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer


def infilling_model(tokens: list[str] = QWEN) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """A random model with these special tokens, without others Qwen2.5-Coder's."""
    tokenizer = tokenizer_with(tokens)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval(), tokenizer
