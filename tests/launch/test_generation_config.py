"""A checkpoint's generation config in the apps and the server: followed, overridden field by field, or left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

import lp
from launch.chat.settings import Settings
from launch.config.sampling import sampled_by_checkpoint
from launch.config.schema import ChatConfig
from lp.sampling.generation_config import CheckpointDefaults
from tests.support.apps import Ran

PROMPT = "def f(x):"
NEW = 24
FIELDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": [*range(3, 500, 2)]},
    {"begin_suppress_tokens": [*range(3, 500, 2)]},
    {"bad_words_ids": [[token] for token in range(3, 500, 3)]},
    {"sequence_bias": [[[token], 9.0] for token in range(3, 500, 5)]},
    {"forced_eos_token_id": 5, "eos_token_id": 5},
    {"min_new_tokens": 20, "eos_token_id": [*range(2, 500, 2)]},
    {"min_length": 24, "eos_token_id": [*range(2, 500, 2)]},
    {"exponential_decay_length_penalty": (2, 2.0), "eos_token_id": 7},
    {"renormalize_logits": True},
    {"remove_invalid_values": True},
]


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """The tiny model's folder with another generation config."""

    def with_fields(**fields: Any) -> Path:
        shutil.copytree(tiny_folder, tmp_path / "model", dirs_exist_ok=True)
        GenerationConfig(**{"eos_token_id": None, "pad_token_id": 0, **fields}).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return with_fields


def _loaded(path: Path) -> tuple[PreTrainedModel, Any]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), AutoTokenizer.from_pretrained(path)


def _text(path: Path) -> str:
    model, tokenizer = _loaded(path)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    new = model.generate(**inputs, max_new_tokens=NEW)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=False))


def _app(launch_generate: Callable[..., Ran], path: Path, *overrides: str) -> Any:
    small = ("model=hf", "model.dtype=float64", f"model.name={path}", "W=4", "N=3", "G=4", f"max_new_tokens={NEW}")
    ran = launch_generate(f"prompt={json.dumps(PROMPT)}", *small, "output=json", "compare=false", *overrides)
    assert ran.code == 0, ran.err
    return json.loads(ran.out.splitlines()[-1])


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
def test_lp_generate_is_as_generate(
    launch_generate: Callable[..., Ran], folder: Callable[..., Path], fields: dict[str, Any]
) -> None:
    """Greedy, token by token."""
    path = folder(**fields)
    assert _app(launch_generate, path)["prompts"][0]["text"] == _text(path)


def test_lp_generate_samples_where_the_checkpoint_does(
    launch_generate: Callable[..., Ran], folder: Callable[..., Path]
) -> None:
    """Under the run's seed, as the decoder alone; `none` is greedy, and sampling=sample is the user's."""
    path = folder(do_sample=True, temperature=0.7, top_p=0.9, repetition_penalty=1.2)
    model, tokenizer = _loaded(path)
    decoder, ids = lp.LookaheadDecoder(model), tokenizer(PROMPT)["input_ids"]
    expected = decoder.generate(ids, NEW, seed=5)
    assert _app(launch_generate, path, "seed=5")["prompts"][0]["text"] == tokenizer.decode(expected.tokens)
    greedy = decoder.generate(ids, NEW, generation_config="none")
    found = _app(launch_generate, path, "generation_config=none")["prompts"][0]["text"]
    assert found == tokenizer.decode(greedy.tokens)
    own = decoder.generate(ids, NEW, lp.SamplingParams(temperature=1.5, seed=5))
    found = _app(launch_generate, path, "seed=5", "sampling=sample", "sampling.temperature=1.5")["prompts"][0]["text"]
    assert found == tokenizer.decode(own.tokens)


def test_the_settings_of_a_chat() -> None:
    """A chat begins as the checkpoint samples; what the user sets counts from there on."""
    config = ChatConfig(sampling=type("Greedy", (), {"name": "greedy"})(), seed=3)
    samples = CheckpointDefaults.of(GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9))
    settings = Settings.of(config).or_checkpoint(samples)
    assert settings.chosen == lp.SamplingParams(temperature=0.6, top_p=0.9, top_k=50, seed=3)
    assert settings.changed(["top_k=0"]).chosen == lp.SamplingParams(temperature=0.6, top_p=0.9, seed=3)
    assert Settings.of(config).or_checkpoint(CheckpointDefaults.of(GenerationConfig(temperature=0.6))).greedy
    given = lp.SamplingParams(temperature=1.5)
    assert sampled_by_checkpoint(given, samples, 3) is given
