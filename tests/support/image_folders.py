"""Tiny random models that take images in folders, with processors that need pillow alone, and images for them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers as tf
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.image_models import EDGE, IMAGE, PATCH, VOCABULARY, image_model

LETTERS = 'abcdefghijklmnopqrstuvwxyz .:{}[]",0123456789_;<>'
SQUARE = {"height": EDGE, "width": EDGE}
END = IMAGE - 1  # the token that ends a turn
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %};{% endfor %}"
    "{{ tools | tojson | lower if tools }}{% if add_generation_prompt %}a:{% endif %}"
)


def image_tokenizer(*names: str, **attributes: Any) -> tf.PreTrainedTokenizerFast:
    """A tokenizer whose tokens are single characters, `<end>`, which ends a turn, and `<image>`.

    Args:
        names: more special tokens.
        attributes: special tokens that processors look for, by the attribute's name.
    """
    as_bytes = bytes_to_unicode()
    tokens = [*(as_bytes[ord(letter)] for letter in LETTERS), *names]
    tokens += [f"<unused{index}>" for index in range(len(tokens), END)]
    words = {token: index for index, token in enumerate([*tokens, "<end>", "<image>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", extra_special_tokens={"image_token": "<image>", **attributes}
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", *names]})
    return tokenizer


def save_image_model(folder: Path, name: str = "llava", seed: int = 0) -> Path:
    """Save a model, its tokenizer and its processor, whose template takes contents as lists of parts alone.

    Args:
        folder: where to.
        name: llava, gemma3 or idefics3.
        seed: seed that the weights are drawn with.
    """
    pytest.importorskip("PIL", reason="the package pillow is not installed")
    image_model(name, seed, torch.float32).save_pretrained(folder)
    _PROCESSORS[name]().save_pretrained(folder)
    try:
        tf.AutoProcessor.from_pretrained(folder)
    except ValueError as error:
        if "image processor class" not in str(error):
            raise
        pytest.skip(f"transformers {tf.__version__} needs torchvision for the images of {name}")
    assert VOCABULARY == IMAGE + 1
    return folder


def _llava() -> Any:
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    return tf.LlavaProcessor(
        LlavaImageProcessorPil(size=SQUARE, crop_size=SQUARE),
        image_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # of the class, which the strategy leaves out
        chat_template=TEMPLATE,
    )


def _gemma3() -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = image_tokenizer("<boi>", "<eoi>", boi_token="<boi>", eoi_token="<eoi>")
    template = TEMPLATE.replace("<image>", "<boi>")
    images = Gemma3ImageProcessorPil(size=SQUARE)
    return tf.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


def _idefics3() -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    size = {"longest_edge": EDGE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    tokenizer = image_tokenizer("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    return tf.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)


_PROCESSORS = {"llava": _llava, "gemma3": _gemma3, "idefics3": _idefics3}


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
