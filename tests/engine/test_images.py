"""Images in a prompt: texts with them are those of transformers' own `generate`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import lp
from lp.engine.engine import Engine
from lp.models.prompt_images import EXACT, EXACT_WITH_VIDEOS, PromptImages
from lp.models.recurrent_layers import TRANSFORMERS_KEEPS_STATES
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.conftest import some_of
from tests.support.architectures import PAGE, versions
from tests.support.captured import captured_runner
from tests.support.image_matrix import image_page
from tests.support.image_models import (
    IMAGE,
    IMAGE_MODELS,
    generated,
    image_model,
    image_prompt,
    skip_without,
    video_prompt,
)
from tests.support.tiny_models import CLOSE, tiny_model

FIXED = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
NEW = 24


def generated_logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The raw logits (T, V) of transformers' own greedy text."""
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    return torch.cat(model.generate(**inputs, max_new_tokens=NEW, **options).logits)


def text_only(inputs: dict[str, Any]) -> dict[str, Any]:
    """The prompt with words in the places of its images."""
    ids = inputs["input_ids"]
    return {"input_ids": torch.where(ids == IMAGE, 7, ids), "attention_mask": inputs["attention_mask"]}


def test_every_model_type_that_takes_images_is_tried() -> None:
    """A type added to EXACT by hand, and run by nothing, is a promise that nobody has checked."""
    tried = {image_model(name).config.model_type for name in IMAGE_MODELS}
    assert tried == EXACT if TRANSFORMERS_KEEPS_STATES else tried < EXACT


@pytest.mark.slow  # it needs every model with every attention
def test_the_page_is_this_run() -> None:
    """A table written by hand would go on promising what no longer holds."""
    written = PAGE.read_text(encoding="utf-8")
    if versions() not in written:
        pytest.skip(f"docs/reference/models.md was made with other versions than {versions()}")
    assert image_page() == written, "run python scripts/tables.py models and look at what changed"


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_images(name: str) -> None:
    """All decoders, against transformers: tokens, and logits, since few words of a random model depend on an image."""
    model = image_model(name)
    for seed, images in ((1, 1), (2, 3)):
        inputs = image_prompt(name, seed, images)
        expected = generated_logits(model, inputs)
        spread = expected.std()
        others = generated_logits(model, inputs | {"pixel_values": inputs["pixel_values"].flip(0, -1) * 0.5})
        assert (others[0] - expected[0]).abs().max() > 5 * CLOSE * spread, "the image must count for something"
        decoders = [lp.AutoregressiveDecoder(model), lp.PlainDecoder(model)]
        for decoder in [*decoders, lp.LookaheadDecoder(model, FIXED), lp.LookaheadDecoder(model)]:
            output = decoder.generate(**inputs, max_new_tokens=NEW, output_logits=True)
            assert output.tokens == expected.argmax(-1).tolist()
            assert (output.logits - expected).abs().max() < CLOSE * spread


@pytest.mark.subset(3)
@pytest.mark.parametrize("name", sorted(EXACT_WITH_VIDEOS & {*IMAGE_MODELS}))
@pytest.mark.parametrize("images", [0, 2])
def test_videos(name: str, images: int) -> None:
    """As images; on several ranks, and in batches, they are the same fields."""
    model = image_model(name)
    inputs = video_prompt(name, 3, images)
    expected = generated_logits(model, inputs)
    spread = expected.std()
    others = generated_logits(model, inputs | {"pixel_values_videos": inputs["pixel_values_videos"].flip(0, -1) * 0.5})
    assert (others[0] - expected[0]).abs().max() > 5 * CLOSE * spread, "the video must count for something"
    decoder = lp.LookaheadDecoder(model, FIXED)
    output = decoder.generate(**inputs, max_new_tokens=NEW, output_logits=True)
    assert output.tokens == expected.argmax(-1).tolist()
    assert (output.logits - expected).abs().max() < CLOSE * spread
    assert generated(model, inputs, NEW, custom_generate=lp.generate) == output.tokens
    with Engine(decoder, 2, 2000) as engine:
        reuses = engine._core._caches.reuses
        outputs = []
        for factor in (1, 1, 2):  # of the pixels
            again = inputs | {"pixel_values_videos": factor * inputs["pixel_values_videos"]}
            handle = engine.submit(**again, max_new_tokens=NEW)
            engine.run()
            outputs.append(handle.result())
            assert outputs[-1].tokens == generated(model, again, NEW)
    assert bool(outputs[1].reused) == reuses and not outputs[2].reused


@pytest.mark.parametrize("name", some_of(IMAGE_MODELS, 3))
def test_sampled_texts(name: str) -> None:
    """The noise is that of the text's places: positions that are counted otherwise must not reach it."""
    model, inputs = image_model(name), image_prompt(name, 4, 2)
    sampling = lp.SamplingParams(temperature=0.9, top_p=0.95, seed=11)
    expected = lp.AutoregressiveDecoder(model).generate(**inputs, max_new_tokens=NEW, sampling=sampling).tokens
    output = lp.LookaheadDecoder(model, FIXED).generate(**inputs, max_new_tokens=NEW, sampling=sampling)
    assert output.tokens == expected


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "qwen3_5"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks(name: str, ranks: int) -> None:
    """Each rank computes the images itself; one of other pixels is told so."""
    skip_without(name)
    model, inputs = image_model(name), image_prompt(name, 5, 2)

    def body(context: ParallelContext) -> list[int]:
        return lp.LookaheadDecoder(model, FIXED, context).generate(**inputs, max_new_tokens=NEW).tokens

    assert run_lockstep(ranks, body) == [generated(model, inputs, NEW)] * ranks

    def differing(context: ParallelContext) -> str:
        own = inputs | {"pixel_values": inputs["pixel_values"] + context.rank}
        with pytest.raises(ValueError, match="images") as error:
            lp.LookaheadDecoder(model, FIXED, context).generate(**own, max_new_tokens=NEW)
        return str(error.value)

    assert all("images" in message for message in run_lockstep(ranks, differing))


@pytest.mark.parametrize("name", some_of(["gemma3", "gemma4", "llava", "qwen2_5_vl", "qwen3_vl", "mistral3"], 3))
def test_captured_steps(name: str) -> None:
    """Their blocks have positions for masks, and those that keys are turned by."""
    skip_without(name)
    model = image_model(name)
    decoder = lp.LookaheadDecoder(model, FIXED)
    captured_runner(decoder)
    for seed, images in ((1, 1), (2, 2)):
        inputs = image_prompt(name, seed, images)
        output = decoder.generate(**inputs, max_new_tokens=NEW)
        assert output.tokens == generated(model, inputs, NEW)
    assert decoder.runner.captured is not None and decoder.runner.captured._steps, "nothing was captured"


@pytest.mark.parametrize("name", some_of(IMAGE_MODELS, 4))
def test_texts_together(name: str) -> None:
    """Texts with one image, with three and with none share steps, and pass each other's offsets by."""
    model = image_model(name)
    rng = random.Random(6)
    prompts = [image_prompt(name, seed, images) for seed, images in ((1, 1), (2, 3), (3, 1))]
    prompts.insert(1, text_only(image_prompt(name, 4, 1)))
    news = [rng.randint(8, NEW) for _ in prompts]
    expected = [generated(model, inputs, new) for inputs, new in zip(prompts, news, strict=True)]
    outputs = lp.LookaheadDecoder(model, FIXED).generate_batch(prompts, news)
    assert [output.tokens for output in outputs] == expected
    with Engine(lp.LookaheadDecoder(model, FIXED), 4, 2000) as engine:  # with reuse, one more a step
        handles = []
        for inputs, new in zip(prompts * 2, news * 2, strict=True):
            handles.append(engine.submit(**inputs, max_new_tokens=new))
            engine.step()
        engine.run()
        assert [handle.result().tokens for handle in handles] == expected * 2


@pytest.mark.parametrize("name", some_of([name for name in IMAGE_MODELS if name != "qwen3_5"], 3))
def test_prefixes_are_reused_with_the_image(name: str) -> None:
    """A second question about an image begins behind it; one about another image computes that one."""
    model = image_model(name)
    first = image_prompt(name, 1, 1)
    longer = image_prompt(name, 1, 1, behind=30)
    other = longer | {"pixel_values": longer["pixel_values"].flip(0, -1)}
    words = text_only(longer)
    end = int((first["input_ids"][0] == IMAGE).nonzero()[-1]) + 1
    generated(model, first, 1)  # which installs hooks on a tower of vision: the model is another one from then on
    with Engine(lp.LookaheadDecoder(model, FIXED), 2, 2000) as engine:
        reuses = engine._core._caches.reuses
        for inputs, least, most in ((first, 0, 0), (longer, end, 1000), (other, 0, 0), (words, 12, end)):
            handle = engine.submit(**inputs, max_new_tokens=NEW)
            engine.run()
            output = handle.result()
            assert output.tokens == generated(model, inputs, NEW)
            assert least * reuses <= output.reused <= most


def test_an_image_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """More places than the image has features: the model says so, once the text has begun."""
    model = image_model("llava")
    inputs = image_prompt("llava", 1, 1)
    wrong = inputs | {"pixel_values": torch.cat([inputs["pixel_values"]] * 2)}
    generated(model, inputs, 1)  # which installs hooks on a tower of vision: the model is another one from then on
    with Engine(lp.LookaheadDecoder(model, FIXED), 2, 2000) as engine:
        failing, fine = engine.submit(**wrong, max_new_tokens=NEW), engine.submit(**inputs, max_new_tokens=NEW)
        engine.run()
        with pytest.raises(ValueError, match="do not match"):
            failing.result()
        assert fine.result().tokens == generated(model, inputs, NEW)
        assert engine.available_slots == 2000, "the slots of a text that failed are free again"
    with pytest.raises(ValueError, match="do not match"):
        lp.LookaheadDecoder(model, FIXED).generate(**wrong, max_new_tokens=NEW)

    def body(context: ParallelContext) -> str:
        decoder = lp.LookaheadDecoder(model, FIXED, context)
        with pytest.raises(ValueError, match="do not match"):
            decoder.generate(**wrong, max_new_tokens=NEW)
        return str(decoder.generate(**inputs, max_new_tokens=NEW).tokens)

    assert run_lockstep(2, body) == [str(generated(model, inputs, NEW))] * 2


def test_what_is_refused() -> None:
    """Each by its name, before anything is computed."""
    model, inputs = image_model("gemma3"), image_prompt("gemma3", 1, 1)
    decoder = lp.LookaheadDecoder(model, FIXED)
    length = inputs["input_ids"].shape[1]
    with pytest.raises(TypeError, match="unexpected keyword argument 'pixels'"):
        decoder.generate(**inputs, pixels=1)
    with pytest.raises(ValueError, match=rf"attention_mask has {length} values, of which {length - 1} are not 0"):
        decoder.generate(**inputs | {"attention_mask": (torch.arange(length) > 0).long()[None]})
    with pytest.raises(ValueError, match="position_ids are not 0 to 2"):
        decoder.generate([1, 2, 3], position_ids=torch.tensor([[0, 1, 5]]))
    with pytest.raises(ValueError, match="no token of the prompt holds an image's place"):
        decoder.generate([1, 2, 3], pixel_values=inputs["pixel_values"])
    with pytest.raises(ValueError, match=f"token_type_ids has 3 values for a prompt of {length} tokens"):
        decoder.generate(**inputs | {"token_type_ids": torch.tensor([[0, 1, 0]])})
    with pytest.raises(ValueError, match="the prompt ends with an image"):
        end = int(inputs["token_type_ids"][0].nonzero()[-1]) + 1
        decoder.generate(**{k: v[:, :end] if k != "pixel_values" else v for k, v in inputs.items()})
    with pytest.raises(ValueError, match="exact=bitwise takes no images"):
        lp.PlainDecoder(image_model("gemma3", dtype=torch.bfloat16), exact="bitwise").generate(**inputs)
    with pytest.raises(TypeError, match="unexpected keyword argument 'pixel_values'"):
        lp.LookaheadDecoder(tiny_model(), FIXED).generate([1, 2, 3], pixel_values=inputs["pixel_values"])
    assert decoder.generate(**inputs, max_new_tokens=4).tokens == generated(model, inputs, 4)


def test_a_type_that_is_not_known_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model may look at a prompt in a way of its own, as PaliGemma does: both ways through all of it."""
    model, inputs = image_model("llava"), image_prompt("llava", 1, 1)
    monkeypatch.setattr("lp.models.prompt_images.EXACT", EXACT - {"llava"})
    with pytest.raises(ValueError, match=r"model type 'llava' is not known to be exact with pixel_values"):
        lp.LookaheadDecoder(model, FIXED).generate(**inputs)
    words = text_only(inputs)
    assert lp.LookaheadDecoder(model, FIXED).generate(**words, max_new_tokens=8).tokens == generated(model, words, 8)


def test_frequencies_that_change_with_the_length_are_refused() -> None:
    """Where they change is counted in positions, which are others behind images."""
    model = image_model("llava", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0})
    with pytest.raises(ValueError, match="'llava' changes its rotary frequencies with the length"):
        lp.LookaheadDecoder(model, FIXED).generate(**image_prompt("llava", 1, 1))


def test_what_no_run_has_shown_to_be_exact_is_refused() -> None:
    """Videos of some models, and the lists of a processor that was not asked for tensors."""
    other = image_prompt("llava", 1, 1)
    with pytest.raises(ValueError, match="pixel_values_videos is given, and of 'gemma4' only images are known"):
        PromptImages.of(image_model("gemma4"), [1], {"pixel_values_videos": other["pixel_values"]})
    model, inputs = image_model("qwen2_5_vl"), image_prompt("qwen2_5_vl", 1, 1)
    decoder = lp.LookaheadDecoder(model, FIXED)
    with pytest.raises(ValueError, match="image_grid_thw is a list; call the processor with return_tensors"):
        decoder.generate(**inputs | {"image_grid_thw": inputs["image_grid_thw"].tolist()})
    with pytest.raises(ValueError, match="prompt 0 has 'max_new_tokens'; give it beside the prompts"):
        decoder.generate_batch([inputs | {"max_new_tokens": 3}])


def test_the_same_pixels_elsewhere_are_another_text() -> None:
    """Positions that a caller gives, as transformers' `generate` does, are a part of what is cached."""
    model, inputs = image_model("qwen2_5_vl"), image_prompt("qwen2_5_vl", 1, 1, behind=30)
    positions = PromptImages.of(model, inputs["input_ids"][0].tolist(), inputs | {"input_ids": None}).positions
    assert positions is not None
    with Engine(lp.LookaheadDecoder(model, FIXED), 2, 2000) as engine:
        handles = []
        for shift in (0, 2, 0):
            handles.append(engine.submit(**inputs, position_ids=positions + shift, max_new_tokens=NEW))
            engine.run()
        outputs = [handle.result() for handle in handles]
    assert outputs[0].tokens == outputs[2].tokens == generated(model, inputs, NEW)
    assert outputs[1].reused == 0 and outputs[2].reused > 0
