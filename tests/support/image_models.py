"""Tiny random models that take images, and prompts for them as a processor gives them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

from tests.support.tiny_models import runs_here, tiny_config

VOCABULARY = 61
IMAGE, VIDEO, OTHERS = 60, 59, 58  # tokens that hold the place of an image's features; nothing else has them
WORDS = 50  # tokens below it are text
EDGE = 8  # pixels
PATCH = 4  # pixels
COLOURS = 3

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": EDGE,
    "patch_size": PATCH,
    "num_channels": COLOURS,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "out_hidden_size": 32,
}
_MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}
_QWEN3_MROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
_WHOLE_HEAD: dict[str, Any] = {"rope_parameters": _QWEN3_MROPE["rope_parameters"] | {"partial_rotary_factor": 1.0}}
_IDS: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": VIDEO, "tie_word_embeddings": False}
_START_END: dict[str, Any] = {"vision_start_token_id": OTHERS, "vision_end_token_id": OTHERS - 1}
_INDEX: dict[str, Any] = {"image_token_index": IMAGE, "tie_word_embeddings": False}
_GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": PATCH,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}
_GEMMA4_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}

# Name -> config class, the name and fields of its text model in tests.support.tiny_models, vision fields, other fields.
_CONFIGS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", "gemma3", {}, _VISION, _INDEX | {"mm_tokens_per_image": 4}),
    "gemma4": (
        "Gemma4Config",
        "gemma4",
        {"use_bidirectional_attention": "vision", "pad_token_id": 0},
        _GEMMA4_VISION | _GEMMA4_ROPE,
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": OTHERS, "audio_config": None},
    ),
    "qwen2_vl": (
        "Qwen2VLConfig",
        "qwen2",
        _MROPE,
        {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": PATCH, "temporal_patch_size": 1},
        _IDS | _START_END,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "qwen2",
        _MROPE,
        _QWEN_VISION | {"window_size": 16, "fullatt_block_indexes": [1]},
        _IDS | _START_END,
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "qwen3",
        _QWEN3_MROPE,
        _QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        _IDS | _START_END,
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        "qwen3_moe",
        _QWEN3_MROPE,
        _QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        _IDS | _START_END,
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        "qwen3_5",
        _WHOLE_HEAD,
        _QWEN_VISION | {"num_position_embeddings": 16},
        _IDS | _START_END,
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        "qwen3_5_moe",
        _WHOLE_HEAD,
        _QWEN_VISION | {"num_position_embeddings": 16},
        _IDS | _START_END,
    ),
    "mistral3": (
        "Mistral3Config",
        "mistral",
        {},
        _VISION | {"model_type": "pixtral", "head_dim": 8},
        _INDEX | {"vision_feature_layer": -1, "spatial_merge_size": 1},
    ),
    "llava": (
        "LlavaConfig",
        "llama",
        {},
        _VISION | {"model_type": "clip_vision_model", "projection_dim": 16},
        _INDEX | {"image_seq_length": 4, "vision_feature_layer": -1},
    ),
    "internvl": ("InternVLConfig", "qwen2", {}, _VISION, _IDS),
    "smolvlm": ("SmolVLMConfig", "llama", {}, _VISION, _IDS | {"scale_factor": 1, "pad_token_id": 0}),
    "idefics3": ("Idefics3Config", "llama", {}, _VISION, _IDS | {"scale_factor": 1, "pad_token_id": 0}),
}
# Sizes of images in patches, (rows, columns), which models differ in; others take EDGE x EDGE pixels.
_QWEN = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
IMAGE_MODELS = [name for name, (config, text, *_) in _CONFIGS.items() if hasattr(tf, config) and runs_here(text)]


def image_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float64, attention: str | None = None, **text_fields: Any
) -> PreTrainedModel:
    """A random model on the CPU, in eval mode, without EOS.

    Args:
        name: one of IMAGE_MODELS.
        seed: seed that the weights are drawn with.
        dtype: type of the weights.
        attention: transformers' name of the attention implementation; None takes the model's own.
        text_fields: fields of the text model's config that differ from the tiny ones.
    """
    skip_without(name)
    config_class, text, fields, vision, others = _CONFIGS[name]
    base = tiny_config(text).to_dict() | fields | text_fields
    text_config = {key: value for key, value in base.items() if key not in ("architectures", "model_type")}
    given = getattr(tf, config_class)
    kinds = given.sub_configs
    generic = kinds.get("text_config") is tf.AutoConfig
    if generic:
        text_config["model_type"] = base["model_type"]
    config = given(text_config=text_config, vision_config=dict(vision), **others)
    torch.manual_seed(seed)
    model = tf.AutoModelForImageTextToText.from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any() and parameter.ndim > 1:  # Gemma 3's projection begins with zeros
                parameter.normal_(std=0.1)
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.generation_config = tf.GenerationConfig(do_sample=False)
    return model.to(dtype).eval()


def image_prompt(
    name: str, seed: int = 0, images: int = 1, words: int = 12, behind: int = 0, dtype: Any = torch.float64
) -> dict[str, Any]:
    """What a processor gives for a prompt with images between its words.

    Args:
        name: one of IMAGE_MODELS.
        seed: seed that words and pixels are drawn with.
        images: how many.
        words: tokens of text before, between and behind them, each.
        behind: tokens of text at the end, besides these.
        dtype: type of the pixels.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)  # of its own: ranks that are threads draw at the same time
    grids = [(2, 4) if name in _QWEN and rng.random() < 0.5 else (2, 2) for _ in range(images)]
    if name in _QWEN:
        grids = [(2 * rows, 2 * columns) for rows, columns in grids]
    ids = _text(rng, words)
    for rows, columns in grids:
        ids += _around(name, rows, columns) + _text(rng, words)
    ids += _text(rng, behind)
    input_ids = torch.tensor([ids])
    is_image = (input_ids == IMAGE).long()
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    pixels = torch.randn(images, COLOURS, EDGE, EDGE, dtype=dtype, generator=generator)
    if name in _QWEN:
        counts = [rows * columns for rows, columns in grids]
        inputs["pixel_values"] = torch.randn(sum(counts), COLOURS * PATCH * PATCH, dtype=dtype, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, rows, columns] for rows, columns in grids])
        inputs["mm_token_type_ids"] = is_image
    elif name == "gemma3":
        inputs |= {"pixel_values": pixels, "token_type_ids": is_image}
    elif name == "gemma4":
        places = torch.tensor([[x, y] for y in range(4) for x in range(4)])  # four patches are a token
        inputs["pixel_values"] = torch.rand(
            images, len(places), COLOURS * PATCH * PATCH, dtype=dtype, generator=generator
        )
        inputs["image_position_ids"] = places[None].expand(images, -1, -1).contiguous()
        inputs["mm_token_type_ids"] = is_image
    elif name == "mistral3":
        inputs |= {"pixel_values": pixels, "image_sizes": torch.tensor([[EDGE, EDGE]] * images)}
    elif name in ("smolvlm", "idefics3"):
        inputs["pixel_values"] = pixels[None]
        inputs["pixel_attention_mask"] = torch.ones(1, images, EDGE, EDGE, dtype=torch.bool)
    else:
        inputs["pixel_values"] = pixels
    return inputs


def video_prompt(name: str, seed: int = 0, images: int = 0, words: int = 10) -> dict[str, Any]:
    """What a processor gives for a prompt with images, and a video of three frames behind them.

    Args:
        name: one of Qwen's.
        seed, images, words: see `image_prompt`.
    """
    frames, rows, columns = 3, 4, 4
    inputs = image_prompt(name, seed, images, words)
    ids = inputs["input_ids"][0].tolist()
    if name.startswith("qwen2"):
        ids += [OTHERS, *[VIDEO] * (frames * rows * columns // 4), OTHERS - 1]
    else:  # a time before each frame
        ids += [7, OTHERS, *[VIDEO] * (rows * columns // 4), OTHERS - 1] * frames
    input_ids = torch.tensor([ids + _text(random.Random(-seed), words)])
    inputs |= {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    inputs["mm_token_type_ids"] = (input_ids == IMAGE).long() + 2 * (input_ids == VIDEO).long()
    if not images:
        del inputs["pixel_values"], inputs["image_grid_thw"]
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(frames * rows * columns, COLOURS * PATCH * PATCH, generator=generator, dtype=torch.float64)
    inputs |= {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[frames, rows, columns]])}
    return inputs | ({"second_per_grid_ts": torch.tensor([0.5])} if name == "qwen2_5_vl" else {})


def _around(name: str, rows: int, columns: int) -> list[int]:
    """The tokens of an image of so many patches."""
    if name in _QWEN:
        return [OTHERS, *[IMAGE] * (rows * columns // 4), OTHERS - 1]
    if name == "internvl":  # which merges 2 x 2 patches
        return [IMAGE]
    return [OTHERS - 1, *[IMAGE] * (rows * columns), OTHERS - 1]


def _text(rng: random.Random, count: int) -> list[int]:
    """Words with repeats."""
    own = [rng.randrange(WORDS) for _ in range(5)]
    return [rng.choice(own) for _ in range(count)]


def generated(model: PreTrainedModel, inputs: dict[str, Any], new: int, **options: Any) -> list[int]:
    """The tokens of transformers' own `generate`."""
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def skip_without(name: str) -> None:
    """Skip a test whose model, or what lp needs for its recurrent layers, this release of transformers lacks."""
    if name not in IMAGE_MODELS:
        pytest.skip(f"transformers {tf.__version__} has no {name}, or not what lp needs for it")
