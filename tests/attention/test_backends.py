"""An attention backend is one class and one registration: a new one is added here as its author would add it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

import lp
from launch.config.builders import decoder_builders
from launch.config.schema import register as register_configs
from launch.config.schema import settings
from launch.running.hydra_app import CONF
from lp.attention import registry
from lp.attention.base import AttentionBackend
from lp.attention.registry import attention_choices, backend_named
from lp.models.runner import ModelRunner
from tests.support.captured import captured_runner
from tests.support.tiny_models import drawn_text, plain_greedy, tiny_model

CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4)


def loop_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention one query head and one token at a time; the arguments and results are transformers'."""
    batch, heads, num_tokens, dim = query.shape
    out = torch.empty(batch, num_tokens, heads, value.shape[-1], dtype=value.dtype)
    for text, head, token in product(range(batch), range(heads), range(num_tokens)):
        kv_head = head * key.shape[1] // heads
        scores = key[text, kv_head] @ query[text, head, token] * (scaling or dim**-0.5)
        if attention_mask is not None:
            scores = scores + attention_mask[min(text, len(attention_mask) - 1), 0, token]
        out[text, token, head] = scores.softmax(-1) @ value[text, kv_head]
    return out, None


class Loop(AttentionBackend):
    """The toy: `auto` prefers it to all others where a model was loaded with sdpa."""

    implementation = "lp_test_loop"
    replaces = ("sdpa",)
    priority = 1

    def unfit(self, model: PreTrainedModel) -> str | None:
        if model.config.model_type == "phi":
            return "attention=loop is not for phi; choose attention=sdpa"
        return None

    def install(self) -> None:
        AttentionInterface.register(self.implementation, loop_attention)
        AttentionMaskInterface.register(self.implementation, eager_mask)


@pytest.fixture
def loop() -> Iterator[None]:
    lp.register_attention("loop")(Loop)
    yield
    del registry._backends["loop"]


@pytest.mark.parametrize("arch", ["llama", "mistral_sliding", "gemma3"])
def test_a_new_backend_decodes_exactly(arch: str, loop: None) -> None:
    model = tiny_model(arch)
    ids = drawn_text(random.Random(6), 30)
    decoder = lp.LookaheadDecoder(model, CONFIG, attention="loop")
    assert decoder.runner.model.config._attn_implementation == "lp_test_loop"
    assert decoder.generate(ids, 16).tokens == plain_greedy(model, ids, 16)


def test_a_new_backend_writes_to_given_cache_slots(loop: None) -> None:
    """The default mask is also that of captured steps."""
    model = tiny_model("llama")
    ids = drawn_text(random.Random(7), 30)
    decoder = lp.LookaheadDecoder(model, CONFIG, attention="loop")
    captured_runner(decoder, probe=True)
    assert decoder.generate(ids, 16).tokens == plain_greedy(model, ids, 16)
    assert decoder.runner.captured and decoder.runner.captured._steps


def test_auto_goes_by_priority_and_fitness(loop: None) -> None:
    assert ModelRunner(tiny_model("llama")).attention == "loop"
    assert ModelRunner(tiny_model("llama", attention="eager")).attention == "eager"
    assert ModelRunner(tiny_model("phi")).attention == "flash"
    with pytest.raises(ValueError, match="not for phi; choose attention=sdpa"):
        ModelRunner(tiny_model("phi"), "loop")


def test_apps_know_a_new_backend_without_a_config_file(loop: None) -> None:
    register_configs()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = settings(compose("benchmark", ["attention=loop", "model=demo"]))
    assert config.attention.name == "loop"
    decoder = decoder_builders(config, ["lookahead"])["lookahead"](tiny_model(), lp.ParallelContext())
    assert isinstance(decoder, lp.LookaheadDecoder) and decoder.runner.attention == "loop"


def test_names_are_checked(loop: None) -> None:
    assert attention_choices() == ["auto", "sdpa", "eager", "flash", "flex", "by_position", "loop"]
    for name in ("loop", "flash", "auto"):
        with pytest.raises(ValueError, match=f"'{name}' is registered already"):
            lp.register_attention(name)(Loop)
    choices = "auto, sdpa, eager, flash, flex, by_position, loop"
    with pytest.raises(ValueError, match=f"attention is 'ring'; it must be one of {choices}"):
        lp.LookaheadDecoder(tiny_model(), attention="ring")
    assert backend_named("loop").name == "loop"


@pytest.mark.parametrize("name", ["auto", "sdpa", "eager", "flash", "flex"])
def test_every_backend_is_a_config(name: str) -> None:
    register_configs()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert settings(compose("generate", [f"attention={name}", "model=demo"])).attention.name == name
