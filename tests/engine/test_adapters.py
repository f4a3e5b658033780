"""LoRA adapters that texts choose: each text is the one that PEFT gives with its adapter active."""

from __future__ import annotations

import random
from typing import Any

import peft
import pytest

import lp
from lp.engine.engine import Engine
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.conftest import some_of
from tests.support.adapted import NAMES, active, add_adapters
from tests.support.captured import captured_runner
from tests.support.image_models import image_model, image_prompt
from tests.support.tiny_models import drawn_text, plain_greedy, tiny_model

FIXED = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)
NEW = 24
ARCHS = ["llama", "mistral_sliding", "qwen2", "qwen3", "gemma3", "phi3", "gpt_neox", "olmo2", "granite", "qwen3_5"]
IDS = drawn_text(random.Random(2), 20)
KINDS = [
    ({"use_dora": True}, "DoraLinearVariant"),
    ({"target_modules": ["embed_tokens"]}, "Embedding"),
    ({"target_modules": ["q_proj", "lm_head"]}, "lm_head gets other rows than the tokens of a pass"),
    ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "lm_head is a"),
]


def adapted(arch: str = "llama", names: tuple[str, ...] = NAMES, **fields: Any) -> Any:
    """A model with adapters of different ranks, of which none is active."""
    model = tiny_model(arch)
    add_adapters(model, names=names, **fields)
    return model


def texts(
    model: Any, ids: list[int] = IDS, names: tuple[str | None, ...] = (None, *NAMES)
) -> dict[str | None, list[int]]:
    """The greedy tokens of transformers and PEFT, by adapter."""
    tokens = {}
    for name in names:
        with active(model, name):
            tokens[name] = plain_greedy(model, ids, NEW)
    return tokens


@pytest.mark.parametrize("arch", some_of(ARCHS, 3))
def test_texts_of_every_adapter(arch: str) -> None:
    """One by one, and in one batch, which groups rows by adapter."""
    model = adapted(arch)
    expected = texts(model)
    assert len({tuple(tokens) for tokens in expected.values()}) == 4, "an adapter that changes nothing tests nothing"
    decoders: list[Any] = [lp.PlainDecoder(model), lp.LookaheadDecoder(model, FIXED), lp.LookaheadDecoder(model)]
    for decoder in decoders:
        for name, tokens in expected.items():
            assert decoder.generate(IDS, NEW, adapter=name).tokens == tokens, name
    together(model, expected)
    with active(model, "red"):  # which texts that choose none then have
        expected[None] = expected["red"]
        together(model, expected)


def together(model: Any, expected: dict[str | None, list[int]]) -> None:
    """Texts of all adapters share steps, twice: the second time behind prefixes."""
    with Engine(lp.LookaheadDecoder(model, FIXED), 5, 1500) as engine:
        for _ in range(2):
            handles = {name: engine.submit(IDS, NEW, adapter=name) for name in [*expected]}
            engine.run()
            for name, handle in handles.items():
                assert handle.result().tokens == expected[name], name


def test_sampled_texts_and_logits() -> None:
    """Under one seed, against the oracle with the adapter active."""
    model = adapted()
    sampling = lp.SamplingParams(temperature=0.8, top_p=0.9, seed=5)
    for name in NAMES:
        output = lp.LookaheadDecoder(model, FIXED).generate(IDS, NEW, sampling, adapter=name, output_logits=True)
        with active(model, name):
            plain = lp.AutoregressiveDecoder(model).generate(IDS, NEW, sampling, output_logits=True)
        assert output.tokens == plain.tokens
        assert (output.logits - plain.logits).abs().max() < 1e-9


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks(ranks: int) -> None:
    """Each rank has all adapters; one that is asked for another is told so."""
    model = adapted()
    expected = texts(model)

    def body(context: ParallelContext) -> list[list[int]]:
        decoder = lp.LookaheadDecoder(model, FIXED, context)
        with Engine(decoder, 4, 1500) as engine:
            handles = [engine.submit(IDS, NEW, adapter=name) for name in expected]
            engine.run()
            return [handle.result().tokens for handle in handles]

    assert run_lockstep(ranks, body) == [list(expected.values())] * ranks

    def differing(context: ParallelContext) -> str:
        with pytest.raises(ValueError, match="adapter") as error:
            lp.LookaheadDecoder(model, FIXED, context).generate(IDS, NEW, adapter=NAMES[context.rank])
        return str(error.value)

    assert all("the adapter of rank" in message for message in run_lockstep(ranks, differing))


def test_nothing_is_shared_between_adapters() -> None:
    """Neither prefixes nor a session's pool: keys and values, and what follows what, are another model's."""
    model = adapted()
    config = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6, pool_scope="session")
    decoder = lp.LookaheadDecoder(model, config)
    with Engine(decoder, 2, 1500) as engine:
        reused, steps = {}, {}
        for turn in (0, 1):
            for name in (None, *NAMES):
                handle = engine.submit(IDS, NEW, adapter=name)
                engine.run()
                reused[name, turn] = handle.result().reused
                steps[name, turn] = len(handle.result().step_stats)
    assert [reused[name, 0] for name in (None, *NAMES)] == [0] * 4
    assert all(reused[name, 1] == len(IDS) - 1 for name in (None, *NAMES))
    fresh = {name: len(lp.LookaheadDecoder(model, FIXED).generate(IDS, NEW, adapter=name).step_stats) for name in NAMES}
    assert {name: steps[name, 0] for name in NAMES} == fresh, "another adapter's texts gave drafts"
    assert sum(steps[name, 1] for name in NAMES) < sum(fresh.values()), "its own gave none"


def test_captured_steps_are_of_the_model_as_it_is() -> None:
    """A text with an adapter of its own takes none; the next one that has none does."""
    model = adapted()
    expected = texts(model)
    decoder = lp.LookaheadDecoder(model, FIXED)
    captured_runner(decoder)
    for name in (None, "red", None, "blue"):
        assert decoder.generate(IDS, NEW, adapter=name).tokens == expected[name]


def test_what_is_refused() -> None:
    """Each by its name, and nothing is computed."""
    model = adapted()
    decoder = lp.LookaheadDecoder(model, FIXED)
    with pytest.raises(ValueError, match="adapter is 'grey'; the model has blue, green, red"):
        decoder.generate(IDS, NEW, adapter="grey")
    with pytest.raises(ValueError, match="adapter is 'red'; the model has none"):
        lp.LookaheadDecoder(tiny_model(), FIXED).generate(IDS, NEW, adapter="red")
    with pytest.raises(ValueError, match="adapter='red' does not go with AutoregressiveDecoder, which takes no tree"):
        lp.AutoregressiveDecoder(model).generate(IDS, NEW, adapter="red")
    bitwise = lp.PlainDecoder(adapted("llama").float(), exact="bitwise")
    with pytest.raises(ValueError, match="adapter='red' does not go with exact=bitwise"):
        bitwise.generate(IDS, NEW, adapter="red")
    with pytest.raises(ValueError, match="does not go with rotary frequencies that change with the length"):
        lp.LookaheadDecoder(adapted("llama_dynamic"), FIXED).generate(IDS, NEW, adapter="red")
    seeing = image_model("llava")
    add_adapters(seeing, names=("red",))
    with pytest.raises(ValueError, match="adapter='red' does not go with images"):
        lp.LookaheadDecoder(seeing, FIXED).generate(**image_prompt("llava"), adapter="red")


@pytest.mark.parametrize(("fields", "message"), KINDS[:3])  # beside modules_to_save PEFT itself activates no other
def test_beside_an_active_adapter_of_another_kind_none_can_be_chosen(fields: dict[str, Any], message: str) -> None:
    """It reached the rows of all texts, those that had chosen another; DoRA was added as plain LoRA."""
    model = adapted(names=("red",))
    add_adapters(model, 9, ("other",), **{"target_modules": ["q_proj"]} | fields)
    decoder = lp.LookaheadDecoder(model, FIXED)
    assert decoder.generate(IDS, NEW, adapter="red").tokens == texts(model, names=("red",))["red"]
    with active(model, "other"), pytest.raises(ValueError, match=f"while 'other' is active on the model: .*{message}"):
        decoder.generate(IDS, NEW, adapter="red")


def test_an_adapter_that_is_deleted_while_its_text_waits() -> None:
    """The text was the base model's, without a word."""
    model = adapted(names=("red", "blue"))
    expected = texts(model, names=("blue",))["blue"]
    with Engine(lp.LookaheadDecoder(model, FIXED), 2, 1500) as engine:
        gone, there = engine.submit(IDS, NEW, adapter="red"), engine.submit(IDS, NEW, adapter="blue")
        model.delete_adapter("red")
        engine.run()
        with pytest.raises(ValueError, match="adapter is 'red'; the model has blue"):
            gone.result()
        assert there.result().tokens == expected


@pytest.mark.parametrize(("fields", "message"), KINDS)
def test_adapters_of_other_kinds_are_refused(fields: dict[str, Any], message: str) -> None:
    """Active on the model they are exact (tests/models/test_adapters.py); rows of one text alone can't have them."""
    model = adapted(names=("red",), **fields)
    with pytest.raises(ValueError, match=f"adapter 'red' cannot be chosen by a text: .*{message}"):
        lp.LookaheadDecoder(model, FIXED).generate(IDS, NEW, adapter="red")


def test_an_adapter_that_is_merged_is_refused() -> None:
    """Its sum is in the weights of all texts."""
    model = adapted(names=("red",))
    model.enable_adapters()
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.merge()
    with pytest.raises(ValueError, match="is merged into the weights"):
        lp.LookaheadDecoder(model, FIXED).generate(IDS, NEW, adapter="red")


def test_an_adapter_that_comes_later() -> None:
    """Loaded while an engine runs, as a server would; texts that run go on."""
    model = adapted(names=("red",))
    expected = texts(model, names=(None, "red"))
    with Engine(lp.LookaheadDecoder(model, FIXED), 3, 1500) as engine:
        first = engine.submit(IDS, NEW, adapter="red")
        engine.step()
        add_adapters(model, 9, ("late",), target_modules=["q_proj", "down_proj"])
        second, third = engine.submit(IDS, NEW, adapter="late"), engine.submit(IDS, NEW)
        engine.run()
        assert first.result().tokens == expected["red"]
        assert second.result().tokens == texts(model, names=("late",))["late"]
        assert third.result().tokens == expected[None]
