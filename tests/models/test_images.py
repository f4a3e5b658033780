"""Checkpoints that take images: loaded whole, divided among ranks, and read from files by parts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import lp
from lp.models.loader import load
from lp.models.tensor_parallel import divide
from lp.parallel.context import ParallelContext
from lp.parallel.replica import Replica
from tests.conftest import some_of
from tests.support.image_models import IMAGE_MODELS, VOCABULARY, generated, image_model, image_prompt
from tests.support.thread_ranks import run_lockstep
from tests.support.tiny_models import letters

FIXED = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
NEW = 16
NO_PLAN = {"qwen3_vl"}  # in transformers


def saved(name: str, folder: Path) -> tf.PreTrainedModel:
    """A model of float32, as it comes back from the folder that it is saved in."""
    model = image_model(name, dtype=torch.float32)
    model.save_pretrained(folder)
    letters(VOCABULARY - 1).save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", some_of(IMAGE_MODELS, 5))
def test_a_checkpoint_is_loaded_with_its_vision(name: str, tmp_path: Path) -> None:
    """Also one that transformers has a causal LM for, which leaves the vision out."""
    model, inputs = saved(name, tmp_path), image_prompt(name, 1, 1, dtype=torch.float32)
    loaded = load(tmp_path).model
    assert type(loaded) is type(model)
    expected = generated(model, inputs, NEW)
    assert lp.LookaheadDecoder(loaded, FIXED).generate(**inputs, max_new_tokens=NEW).tokens == expected


def test_a_checkpoint_of_the_text_alone_is_a_causal_lm(tmp_path: Path) -> None:
    """Its config names another class."""
    model = saved("qwen3_5", tmp_path)
    config = model.config
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(tmp_path)
    assert type(load(tmp_path).model).__name__ == "Qwen3_5ForCausalLM"


def test_a_type_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    """As PaliGemma, which sees both ways through the whole prompt."""
    tf.PaliGemmaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a 'paligemma' model, which is not a causal LM in transformers"):
        load(tmp_path)


@pytest.mark.parametrize("name", some_of([name for name in IMAGE_MODELS if name not in NO_PLAN], 4))
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_divide_a_model(name: str, world: int) -> None:
    """Its text, that is: plans name layers of the text model, which lies deeper than in a causal LM."""
    model, inputs = image_model(name), image_prompt(name, 1, 2)
    expected = generated(model, inputs, NEW)
    whole = sum(each.numel() for each in model.get_decoder().parameters())
    text = model.config.get_text_config()  # transformers 5.17's plan of Qwen3-VL-MoE does not name the experts
    leaves_experts_whole = hasattr(text, "num_experts") and "experts" not in str(text.base_model_tp_plan)

    def body(context: ParallelContext) -> list[list[int]]:
        part = divide(copy.deepcopy(model), context.replica)
        if not leaves_experts_whole:
            assert sum(each.numel() for each in part.get_decoder().parameters()) < 0.7 * whole
        decoders: list[Any] = [lp.AutoregressiveDecoder(part, context), lp.LookaheadDecoder(part, FIXED, context)]
        return [decoder.generate(**inputs, max_new_tokens=NEW).tokens for decoder in decoders]

    assert run_lockstep(world, body, tp=2) == [[expected] * 2] * world


@pytest.mark.parametrize("name", some_of([name for name in IMAGE_MODELS if name not in NO_PLAN], 4))
def test_parts_read_from_files(name: str, tmp_path: Path) -> None:
    """A rank reads its part of the text, and all of the vision."""
    saved(name, tmp_path)
    whole = load(tmp_path).model
    found = load(tmp_path, context=ParallelContext(replica=Replica(1, 2))).model
    expected = divide(copy.deepcopy(whole), Replica(1, 2))
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, kind)()), dict(getattr(expected, kind)())
        assert ours.keys() == theirs.keys()
        for parameter, values in theirs.items():
            assert torch.equal(ours[parameter], values), parameter
