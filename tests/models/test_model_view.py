"""A runner's view of a model: the same weights, and whatever is changed on the model later."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import lp
from lp.models.model_view import ModelView
from tests.support.captured import captured_runner
from tests.support.peft_releases import add_adapter
from tests.support.tiny_models import drawn_text, plain_greedy, tiny_model

ARCHS = ["llama", "gpt2", "falcon", "mistral_sliding", "mixtral", "gemma3", "gemma4", "llama_longrope", "deepseek_v3"]
CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4)
IDS = drawn_text(random.Random(5), 30)
NEW = 16  # tokens of a text
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_view_has_the_weights_themselves(arch: str) -> None:
    """A copy of a weight would double a model in memory; a config that is shared is seen by others."""
    model = tiny_model(arch)
    copied = ModelView(model).model
    assert type(copied) is type(model) and copied is not model and copied.config is not model.config
    assert copied.config.to_dict() == model.config.to_dict()
    names, originals = [name for name, _ in copied.named_modules()], dict(model.named_modules())
    assert names == [*originals]
    for name, parameter in copied.named_parameters(remove_duplicate=False):
        assert parameter is model.get_parameter(name)
    for name, buffer in copied.named_buffers():
        own = buffer.ndim == 1 and name.endswith("inv_freq")  # which a rotary scaling writes
        assert (buffer is model.get_buffer(name)) != own
    configs = {id(value) for module in model.modules() for value in vars(module).values() if value is model.config}
    assert not any(id(value) in configs for module in copied.modules() for value in vars(module).values())


def _adapted(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    add_adapter(model, LORA, "first")
    model.double().eval()


def _second(model: PreTrainedModel) -> None:
    torch.manual_seed(2)
    add_adapter(model, LORA, "second")
    model.double().eval()
    model.set_adapter("second")


def _head(model: PreTrainedModel) -> None:
    old = model.get_output_embeddings()
    model.set_output_embeddings(nn.Linear(old.in_features, old.out_features, bias=False, dtype=torch.float64))


def _in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight.neg_()


def _hook(model: PreTrainedModel) -> None:
    model.get_decoder().layers[1].register_forward_hook(lambda module, args, output: -output)


def _skip_a_layer(model: PreTrainedModel) -> None:
    layers = model.get_decoder().layers
    layers[0], layers[1] = layers[1], layers[0]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index


CHANGES: list[Callable[[PreTrainedModel], object]] = [
    _adapted,
    _second,
    lambda model: model.set_adapter("first"),
    lambda model: model.disable_adapters(),
    lambda model: model.enable_adapters(),
    _head,
    _in_place,
    _hook,
    _skip_a_layer,
    lambda model: model.set_attn_implementation("eager"),
]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_what_is_changed_later_is_seen(arch: str, captured: bool) -> None:
    """An adapter loaded behind a decoder's back would be left out of its text without a word."""
    model = tiny_model(arch)
    decoder = lp.LookaheadDecoder(model, CONFIG)
    if captured:
        captured_runner(decoder)
    before, texts = decoder.runner.attention, [plain_greedy(model, IDS, NEW)]
    for change in CHANGES:
        change(model)
        texts.append(plain_greedy(model, IDS, NEW))
        assert decoder.generate(IDS, NEW).tokens == texts[-1]
    assert decoder.runner.attention is before
    assert sum(a != b for a, b in pairwise(texts)) >= len(CHANGES) - 1, "changes that tell"


def test_a_view_is_made_once() -> None:
    """At every text it would cost as much as a step, and throw captured steps away."""
    model = tiny_model("gemma3")
    decoder = lp.LookaheadDecoder(model, CONFIG)
    copied = decoder.runner.model
    for _ in range(2):
        decoder.generate(IDS, 4)
        plain_greedy(model, IDS, 4)
        lp.LookaheadDecoder(model, CONFIG, attention="eager").generate(IDS, 4)
    assert decoder.runner.model is copied


@pytest.mark.parametrize("second", ["cpu", "disk"])
def test_wrapped_forwards(second: str, tmp_path: Path) -> None:
    """accelerate replaces `forward` by one bound to its module: unbound, the view would run the original."""
    model = tiny_model("mistral_sliding")
    devices = dict.fromkeys(
        ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"], "cpu"
    )
    accelerate.dispatch_model(model, devices | {"model.layers.1": second}, offload_dir=tmp_path, force_hooks=True)
    assert "forward" in vars(model.get_decoder().layers[1])
    plain = plain_greedy(model, IDS, NEW)
    for attention in ("flash", "sdpa", "eager"):
        assert lp.LookaheadDecoder(model, CONFIG, attention=attention).generate(IDS, NEW).tokens == plain
    assert plain_greedy(model, IDS, NEW) == plain


@pytest.mark.parametrize("compiled", ["compile", "forward", "wrapped"])
def test_compiled_models(compiled: str) -> None:
    """What torch.compile made runs the original, with the original's sliding window and attention."""
    model: Any = tiny_model("mistral_sliding")
    plain = plain_greedy(model, IDS, NEW)
    if compiled == "compile":
        model.compile(backend="eager")
    elif compiled == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    assert lp.LookaheadDecoder(model, CONFIG, attention="flash").generate(IDS, NEW).tokens == plain


def test_recorded_states_stay_the_models_own() -> None:
    """transformers installs hooks for what a config asks to record; a view would install them twice."""
    model = tiny_model("llama", output_hidden_states=True)
    decoder = lp.LookaheadDecoder(model, CONFIG)
    plain = plain_greedy(model, IDS, NEW)
    assert decoder.generate(IDS, NEW).tokens == plain
    assert len(model(torch.tensor([IDS])).hidden_states) == model.config.num_hidden_layers + 1
    assert model.config.output_hidden_states
