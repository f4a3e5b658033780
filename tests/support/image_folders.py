"""A tiny random LLaVA in a folder, with a tokenizer and a processor that need pillow alone, and images for it."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers as tf
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.image_models import EDGE, IMAGE, PATCH, VOCABULARY, image_model

LETTERS = 'abcdefghijklmnopqrstuvwxyz .:{}[]",0123456789_;<>'
END = IMAGE - 1  # the token that ends a turn
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %};{% endfor %}"
    "{{ tools | tojson | lower if tools }}{% if add_generation_prompt %}a:{% endif %}"
)


def image_tokenizer() -> tf.PreTrainedTokenizerFast:
    """A tokenizer whose tokens are single characters, `<end>`, which ends a turn, and `<image>`."""
    as_bytes = bytes_to_unicode()
    words = {as_bytes[ord(letter)]: index for index, letter in enumerate(LETTERS)}
    words |= {f"<unused{index}>": index for index in range(len(words), END)} | {"<end>": END, "<image>": IMAGE}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return tokenizer


def save_image_model(folder: Path, seed: int = 0) -> Path:
    """Save the model, its tokenizer and its processor, whose template takes contents as lists of parts alone.

    Args:
        folder: where to.
        seed: seed that the weights are drawn with.
    """
    pytest.importorskip("PIL", reason="the package pillow is not installed")
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    image_model("llava", seed, torch.float32).save_pretrained(folder)
    sizes = {"size": {"height": EDGE, "width": EDGE}, "crop_size": {"height": EDGE, "width": EDGE}}
    processor = tf.LlavaProcessor(
        LlavaImageProcessorPil(**sizes),
        image_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # of the class, which the strategy leaves out
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    assert VOCABULARY == IMAGE + 1
    return folder


def picture(seed: int, width: int = 12, height: int = 10, kind: str = "PNG") -> bytes:
    """The content of an image's file, of colours drawn with this seed."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    """A file's content as a data URL."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
