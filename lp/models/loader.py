"""Load a causal LM and its tokenizer, or say in one line why not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lp.models.rope import rope_boundary

DEMO_MODEL = Path(__file__).parent / "demo"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """A model ready to decode, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(
    name_or_path: str | Path,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Loaded:
    """Load a model folder or hub name through transformers.

    Args:
        name_or_path: folder with config.json, or a hub name; "demo" is the embedded model.
        dtype: float64, float32, bfloat16, float16, or "auto" for what the checkpoint says.
        device: torch device of the weights.
        attn_implementation: transformers' name; None takes sdpa where the model has it.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        ValueError: no such folder, not a causal LM, an architecture that takes no tree mask, a tokenizer
            larger than the model's vocabulary, or an unknown dtype.
    """
    source = str(DEMO_MODEL) if str(name_or_path) == "demo" else str(name_or_path)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {[*DTYPES, 'auto']}")
    config = _config(source, trust_remote_code)
    check_supported(config)
    kwargs: dict[str, Any] = {"dtype": DTYPES.get(dtype, "auto"), "trust_remote_code": trust_remote_code}
    if attn_implementation:
        kwargs["attn_implementation"] = attn_implementation
    try:
        model = AutoModelForCausalLM.from_pretrained(source, config=config, use_safetensors=True, **kwargs)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load {source!r}: {_first_line(error)}") from error
    check_vocabulary(model, tokenizer)
    return Loaded(model.to(device).eval(), tokenizer)


def check_supported(config: Any) -> None:
    """Refuse, by name, what a tree-shaped step cannot be exact for.

    Raises:
        ValueError: the architecture and why.
    """
    kind = getattr(config, "model_type", "unknown")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"model type {kind!r} is an encoder-decoder; lookahead decoding needs a causal LM")
    if kind == "bloom" or getattr(config, "alibi", False):
        raise ValueError(
            f"model type {kind!r} uses alibi, which ties attention to a row's place in the cache; "
            "a step of several branches can't be exact: use a model with rotary or learned positions"
        )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that can produce ids the model has no embedding for.

    Raises:
        ValueError: both sizes.
    """
    largest, rows = max(tokenizer.get_vocab().values(), default=-1), model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise ValueError(
            f"the tokenizer's largest id is {largest} but the model embeds {rows} tokens; "
            "load the tokenizer that belongs to this model"
        )


def context_limit(model: PreTrainedModel) -> int | None:
    """Positions the model can take, or None where its config names no limit."""
    config = model.config.get_text_config()
    boundary = rope_boundary(config)
    stretched = boundary.stretched if boundary else None
    return stretched or getattr(config, "max_position_embeddings", None)


def _config(source: str, trust_remote_code: bool) -> Any:
    if source.startswith(("/", ".", "~")) and not Path(source).expanduser().is_dir():
        raise ValueError(
            f"model folder {source!r} does not exist; give a folder with config.json, a hub name or 'demo'"
        )
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read a model config from {source!r}: {_first_line(error)}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping and not trust_remote_code:
        raise ValueError(f"{source!r} is a {config.model_type!r} model, which is not a causal LM in transformers")
    return config


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
