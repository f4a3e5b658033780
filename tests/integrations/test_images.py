"""Images through transformers' own `generate`: with `custom_generate=lp.generate`, and on an accelerated model."""

from __future__ import annotations

import inspect
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, pipeline

import lp
from lp.models.prompt_images import PromptImages
from tests.conftest import some_of
from tests.support.image_folders import picture, save_image_model
from tests.support.image_models import IMAGE, IMAGE_MODELS, generated, image_model, image_prompt

NEW = 16


def words_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """A processor's output for a text: the same fields, but for pixels and what belongs to them."""
    texts = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    types = {name: torch.zeros_like(inputs[name]) for name in inputs if name.endswith("token_type_ids")}
    return texts | types | {"input_ids": torch.where(texts["input_ids"] == IMAGE, 7, texts["input_ids"])}


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes every text that lp decodes."""
    calls: list[int] = []
    generate = lp.LookaheadDecoder.generate

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(lp.LookaheadDecoder, "generate", noting)
    return calls


@pytest.mark.parametrize("name", some_of(IMAGE_MODELS, 5))
def test_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With features that transformers has encoded already, and positions along three axes."""
    model = image_model(name)
    for inputs in (image_prompt(name, 1, 2), words_of(image_prompt(name, 2, 1))):
        expected = generated(model, inputs, NEW)
        calls = counting(monkeypatch)
        assert generated(model, inputs, NEW, custom_generate=lp.generate) == expected
        lp.accelerate(model)
        assert generated(model, inputs, NEW) == expected
        lp.restore(model)
        assert len(calls) == 2


def test_several_prompts_with_images_are_left_to_transformers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which image belongs to which prompt is the model's own matter."""
    model = image_model("llava")
    one, other = image_prompt("llava", 1, 1), image_prompt("llava", 2, 1)
    both = {name: torch.cat([one[name], other[name]]) for name in one}
    with pytest.raises(ValueError, match=r"takes [a-z_]+ for one prompt without padding, and there are 2"):
        batch(model, both, custom_generate=lp.generate)
    expected = batch(model, both)
    calls = counting(monkeypatch)
    lp.accelerate(model)
    with caplog.at_level(logging.WARNING, "lp"):
        assert torch.equal(batch(model, both), expected)
    lp.restore(model)
    assert not calls and "this call of generate is transformers' own: lp.generate takes " in caplog.text


def batch(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    """The tokens of `generate` for several prompts."""
    tokens: torch.Tensor = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)
    return tokens


def test_texts_of_a_batch_need_no_images() -> None:
    """A processor gives token types for texts, too, and transformers positions along three axes."""
    model = image_model("qwen2_5_vl")
    one, other = (words_of(image_prompt("qwen2_5_vl", seed, 1)) for seed in (1, 2))
    length = min(one["input_ids"].shape[1], other["input_ids"].shape[1])
    both = {name: torch.cat([one[name][:, :length], other[name][:, :length]]) for name in one}
    both["attention_mask"][1, :3] = 0
    assert torch.equal(batch(model, both, custom_generate=lp.generate), batch(model, both))


def test_the_model_is_taken_for_the_same_behind_each_text() -> None:
    """`generate` leaves each text's rotary deltas on the model; the view would be copied, and steps captured anew."""
    model, inputs = image_model("qwen2_5_vl"), image_prompt("qwen2_5_vl", 1, 1)
    decoder = lp.LookaheadDecoder(model)
    decoder.generate(**inputs, max_new_tokens=2)
    view = decoder.runner.model
    generated(model, inputs, 2)
    decoder.generate(**image_prompt("qwen2_5_vl", 2, 2), max_new_tokens=2)
    assert decoder.runner.model is view


def test_other_media_are_left_to_transformers() -> None:
    """No run has shown that texts behind them are exact; transformers hands them over encoded, under another name."""
    for name, medium, known in (("gemma4", "video", "images"), ("qwen2_5_vl", "audio", "images and videos")):
        model, inputs = image_model(name), image_prompt(name, 1, 1)
        given = {"mm_token_type_ids": inputs["mm_token_type_ids"]} | {"mm_encoder_outputs": {medium: torch.ones(1)}}
        if "mm_encoder_outputs" not in inspect.signature(type(model).forward).parameters:
            pytest.skip("this release of transformers hands media over as pixels")
        with pytest.raises(ValueError, match=f"{medium} is given, and of '{name}' only {known} are known to be exact"):
            PromptImages.of(model, inputs["input_ids"][0].tolist(), given)


@pytest.mark.parametrize("name", ["llava", "gemma3", "idefics3"])
def test_a_pipeline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pipeline("image-text-to-text")` with `custom_generate`, and of an accelerated model; chats and plain prompts."""
    pillow = pytest.importorskip("PIL.Image", reason="the package pillow is not installed")
    save_image_model(tmp_path, name)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float64)
    processor = AutoProcessor.from_pretrained(tmp_path)
    pipe = pipeline("image-text-to-text", model=model, processor=processor)

    def answers(**options: Any) -> list[Any]:
        greedy = {"max_new_tokens": NEW, "do_sample": False, **options}
        calls = []
        for seed in (1, 2):
            image = pillow.open(io.BytesIO(picture(seed)))
            text = [{"type": "image", "image": image}, {"type": "text", "text": "what is it"}]
            chat = [{"role": "user", "content": text}]
            calls.append(pipe(text=chat, return_full_text=False, generate_kwargs=dict(greedy)))
            prompt = processor.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
            calls.append(pipe(images=image, text=prompt, generate_kwargs=dict(greedy)))
        return calls

    expected = answers()
    calls = counting(monkeypatch)
    assert answers(custom_generate=lp.generate, window_size=4, ngram_size=3, guess_set_size=4) == expected
    lp.accelerate(model)
    assert answers() == expected
    lp.restore(model)
    assert len(calls) == 8
    assert expected[0] != expected[2]  # another image
