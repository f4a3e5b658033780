"""PEFT's adapters through PEFT's own `generate(custom_generate=FIXED)` and in decoders: exact, or refused."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import lp
from tests.support.peft_releases import skip_without_peft
from tests.support.tiny_models import ARCHITECTURES, drawn_text, tiny_config, tiny_model

NEW = 24
SHAPE: dict[str, Any] = {"window_size": 5, "ngram_size": 3, "guess_set_size": 5}
FIXED = functools.partial(lp.generate, **SHAPE)  # the default would measure what steps cost, for every model
# These change what modules compute of a row, whatever rows are beside it.
WEIGHTS: dict[str, Callable[[], Any]] = {
    "lora": lambda: _lora(),
    "dora": lambda: _lora(use_dora=True),
    "oft": lambda: peft.OFTConfig(
        task_type="CAUSAL_LM", init_weights=False, oft_block_size=4, target_modules="all-linear"
    ),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", init_ia3_weights=False, target_modules="all-linear", feedforward_modules=[]
    ),
}
PROMPTS: dict[str, Callable[[], Any]] = {
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16),
}


def _lora(**fields: Any) -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules="all-linear", **fields)


def _adapted(config: Any, arch: str = "llama", seed: int = 0) -> Any:
    model = tiny_model(arch, seed)
    model.generation_config.pad_token_id = 0
    return peft.get_peft_model(model, config).to(torch.float64).eval()


def _asked(ids: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}


def _text(model: Any, ids: torch.Tensor, **asked: Any) -> list[list[int]]:
    return model.generate(**_asked(ids), **asked)[:, ids.shape[1] :].tolist()


@pytest.mark.subset(2)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_adapters_of_the_weights_are_exact(kind: str) -> None:
    """Drawn models and prompts; PEFT's text must differ from the base model's, or nothing is tested."""
    rng, changed = random.Random(kind), 0
    for _ in range(2):
        model = _adapted(WEIGHTS[kind](), rng.choice(["llama", "mistral", "qwen2", "qwen3"]), rng.randrange(99))
        ids = torch.tensor([drawn_text(rng, 12) for _ in range(2)])
        expected = _text(model, ids)
        assert _text(model, ids, custom_generate=FIXED) == expected
        assert lp.LookaheadDecoder(model, lp.LookaheadConfig(**SHAPE)).generate(ids[0], NEW).tokens == expected[0]
        with model.disable_adapter():
            changed += _text(model, ids) != expected
            assert _text(model, ids, custom_generate=FIXED) == _text(model, ids)
    assert changed


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompt_learning_is_refused(kind: str) -> None:
    """Ignored, the text was exactly the base model's; the base model itself stays usable, as before the adapter."""
    if kind == "prefix tuning":  # an older PEFT names the cache otherwise: transformers itself drops its prefix
        skip_without_peft()
    rng = random.Random(kind)
    for arch in ("llama", "phi"):
        model = _adapted(PROMPTS[kind](), arch, rng.randrange(99))
        ids = torch.tensor([drawn_text(rng, 10)])
        base = model.get_base_model()
        expected = _text(base, ids)
        assert _text(model, ids) != expected
        with pytest.raises(ValueError, match=r"replaced on this model \(by PeftModelForCausalLM\).*such as LoRA"):
            _text(model, ids, custom_generate=FIXED)
        for decoder in (lp.LookaheadDecoder, lp.AutoregressiveDecoder):
            with pytest.raises(ValueError, match="_TUNING, which puts virtual tokens"):
                decoder(model)
        assert _text(base, ids, custom_generate=FIXED) == expected
        with model.disable_adapter():
            assert _text(model, ids, custom_generate=FIXED) == expected


def test_activated_lora_is_refused() -> None:
    """It changes rows by their distance from the prompt's end in one pass: the probe cannot see that."""
    model = _adapted(_lora(alora_invocation_tokens=[7, 1]))
    ids = torch.tensor([[5, 6, 7, 1, 2, 3, 9, 12]])
    base = model.get_base_model()
    assert _text(model, ids) != _text(base, ids)
    refusals = [
        lambda: _text(model, ids, custom_generate=FIXED),
        lambda: lp.LookaheadDecoder(model),
        lambda: lp.LookaheadDecoder(base),
    ]
    for refused in refusals:
        with pytest.raises(ValueError, match="activated LORA"):
            refused()


@pytest.mark.parametrize("make", [lp.LookaheadDecoder, lp.PlainDecoder, lp.AutoregressiveDecoder])
def test_activated_lora_that_comes_later_is_refused(make: Any) -> None:
    """A decoder that was made before gave wrong text, in silence."""
    model = tiny_model()
    decoder = make(model)
    decoder.generate([5, 6, 7], 2)
    peft.get_peft_model(model, _lora(alora_invocation_tokens=[7, 1]))
    with pytest.raises(ValueError, match="activated LORA"):
        decoder.generate([5, 6, 7, 1, 2], 2)


def test_an_adapter_among_others() -> None:
    """The active one counts."""
    model = _adapted(_lora())
    model.add_adapter("second", _lora())
    model = model.to(torch.float64)
    ids = torch.tensor([[5, 6, 7, 1, 2, 3, 9, 12]])
    texts = []
    for name in ("default", "second"):
        model.set_adapter(name)
        texts.append(_text(model, ids))
        assert _text(model, ids, custom_generate=FIXED) == texts[-1]
    assert texts[0] != texts[1]


class _Prepares(LlamaForCausalLM):
    """A user's class, which puts its own inputs before the prompt."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return super().prepare_inputs_for_generation((input_ids + 1) % 61, **kwargs)


class _Plain(LlamaForCausalLM):
    """A user's class that leaves its inputs alone."""


def _own(made: type[PreTrainedModel]) -> PreTrainedModel:
    model = made(tiny_config("llama")).to(torch.float64).eval()  # type: ignore[call-arg]
    model.generation_config.update(do_sample=False, pad_token_id=0)
    return model


def test_a_class_that_prepares_its_own_inputs_is_refused() -> None:
    """The decoder would never call it."""
    ids = torch.tensor([[5, 6, 7, 1]])
    with pytest.raises(ValueError, match=r"_Prepares.prepare_inputs_for_generation comes from .* and not"):
        _text(_own(_Prepares), ids, custom_generate=FIXED)
    model = _own(_Plain)
    assert _text(model, ids, custom_generate=FIXED) == _text(model, ids)


@pytest.mark.parametrize("name", ["a function", "a method"])
def test_inputs_prepared_by_something_set_on_the_model(name: str) -> None:
    """PEFT is not the only one that may set it; what was there may be set back."""
    model, ids = tiny_model(), torch.tensor([[5, 6, 7, 1]])
    model.generation_config.pad_token_id = 0
    own = model.prepare_inputs_for_generation

    class Other:
        def prepare(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
            return own(input_ids, **kwargs)

    other = Other()
    model.prepare_inputs_for_generation = other.prepare if name == "a method" else functools.partial(other.prepare)
    with pytest.raises(ValueError, match="was replaced on this model"):
        _text(model, ids, custom_generate=FIXED)
    model.prepare_inputs_for_generation = own
    assert _text(model, ids, custom_generate=FIXED) == _text(model, ids)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_own_classes_prepare_tokens_alone(arch: str) -> None:
    model, ids = tiny_model(arch), torch.tensor([[5, 6, 7, 1]])
    model.generation_config.pad_token_id = 0
    assert _text(model, ids, custom_generate=FIXED) == _text(model, ids)
