"""`lp.accelerate(model)`: `model.generate(...)` as it stands goes through lp, or says why not."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import lp
from lp.integrations.accelerate import Accelerated
from lp.integrations.custom_generate import Plan
from lp.models.bitwise import runner_for
from lp.models.loader import DEMO_MODEL, Loaded, load
from lp.models.releases import cache_in, cache_keyword
from lp.parallel.agreement import exchange
from lp.parallel.thread_ranks import run_lockstep
from tests.support.tiny_models import CONTEXT, tiny_model

IDS = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4, 5, 9, 1, 2]])
ASKED: dict[str, Any] = {"max_new_tokens": 16, "attention_mask": torch.ones_like(IDS), "pad_token_id": 0}
SHAPE = lp.LookaheadConfig(window_size=5, ngram_size=3, guess_set_size=5)
DEMO = pytest.mark.skipif(
    not (DEMO_MODEL / "model.safetensors").exists(), reason="the demo model's weights are not in this checkout"
)


class Through(list[int]):
    """Records calls that went through lp, to tell them from those of transformers' own loop."""

    def taken(self) -> int:
        """Number of calls that went through lp since the last question."""
        count = len(self)
        self.clear()
        return count


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> Through:
    seen = Through()
    run = Plan.run

    def noted(plan: Plan, *args: Any) -> Any:
        seen.append(len(plan.input_ids))
        return run(plan, *args)

    monkeypatch.setattr(Plan, "run", noted)
    return seen


@pytest.fixture(scope="module")
def shared() -> PreTrainedModel:
    return tiny_model("llama").double()


@pytest.fixture
def model(shared: PreTrainedModel) -> Iterator[PreTrainedModel]:
    before, config = {*vars(shared)}, shared.generation_config
    yield lp.accelerate(shared, SHAPE)
    lp.restore(shared)
    shared.generation_config = config
    assert {name for name in vars(shared) if not name.startswith("_lp_")} == {
        name for name in before if not name.startswith("_lp_")
    }


@pytest.fixture(scope="module")
def demo() -> Loaded:
    return load("demo", "float64")  # no near-ties


def _own(model: PreTrainedModel, *args: Any, **asked: Any) -> Any:
    """The tokens of transformers' own `generate`, which a call through lp must have too."""
    return type(model).generate(model, *args, **asked)


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of calls that are not lp's."""
    return [record.message for record in caplog.records if record.name == "lp.integrations.accelerate"]


class _Collected(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


class _Sums(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(-1) % 7 == 0


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
        {"generation_config": GenerationConfig(max_new_tokens=9, suppress_tokens=[1, 2], pad_token_id=0)},
        {"max_length": 20, "max_new_tokens": None},
        {"stopping_criteria": [_Sums()]},
        {"return_dict_in_generate": True, "output_scores": True},
        {"top_k": None, "num_return_sequences": 1},
    ],
    ids=lambda asked: "+".join(asked) or "plain",
)
def test_a_call_as_it_stands_goes_through_lp(model: PreTrainedModel, through: Through, asked: dict[str, Any]) -> None:
    """Keywords, a generation config, criteria and a returned dict reach lp as they reach transformers."""
    if "generation_config" in asked:
        asked = {"attention_mask": torch.ones_like(IDS)} | asked
    else:
        asked = ASKED | asked
    expected, output = _own(model, IDS, **asked), model.generate(IDS, **asked)
    assert through.taken() == 1
    if "output_scores" in asked:
        torch.testing.assert_close(output.scores, expected.scores, rtol=1e-6, atol=1e-6)
        assert cache_in(output) is None, "as the page says"
        output, expected = output.sequences, expected.sequences
    assert output.tolist() == expected.tolist()


def test_positional_arguments_and_the_model_s_generation_config(model: PreTrainedModel, through: Through) -> None:
    """The second positional argument is the config; what neither says is the model's."""
    model.generation_config = GenerationConfig(repetition_penalty=1.5, pad_token_id=0)
    config = GenerationConfig(max_new_tokens=11)
    asked = {"attention_mask": torch.ones_like(IDS)}
    assert model.generate(IDS, config, **asked).tolist() == _own(model, IDS, config, **asked).tolist()
    assert through.taken() == 1 and config.max_new_tokens == 11


def test_arguments_that_transformers_does_not_take(model: PreTrainedModel, through: Through) -> None:
    """Transformers' own error, and no text that one of two values was left out of."""
    count = len(inspect.signature(type(model).generate).parameters) - 2  # self, and those by name
    for args, kwargs in (((IDS,), {"inputs": IDS}), ((IDS, *[None] * count), {})):
        with pytest.raises(TypeError):
            model.generate(*args, **kwargs | {"max_new_tokens": 4})
        assert not through.taken()


def test_sampling_follows_torch_s_seed(model: PreTrainedModel, through: Through) -> None:
    """One seed of torch gives one text; the distribution is the business of test_distribution."""
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(model.generate(IDS, **ASKED, do_sample=True, temperature=0.9).tolist())
    assert texts[0] == texts[1] != texts[2] and through.taken() == 3


def test_a_streamer_gets_the_text_as_it_comes(model: PreTrainedModel, through: Through) -> None:
    """Given to generate with custom_generate it got the prompt and nothing more."""
    ours, theirs = _Collected(), _Collected()
    out = model.generate(IDS, **ASKED, streamer=ours)
    _own(model, IDS, **ASKED, streamer=theirs)
    assert through.taken() == 1 and (ours.ended, ours.puts[0]) == (1, theirs.puts[0])
    shown = [[token for tokens in each.puts for token in tokens] for each in (ours, theirs)]
    assert shown == [out[0].tolist()] * 2 and len(ours.puts) > 2


@DEMO
def test_stop_strings_and_an_iterator_of_text(demo: Loaded, through: Through) -> None:
    """Stop strings raised for want of a tokenizer; both come from keywords, a config, or the checkpoint's own."""
    model, tokenizer = lp.accelerate(demo.model, SHAPE), demo.tokenizer
    try:
        inputs = tokenizer("def add(a, b):\n", return_tensors="pt")
        asked: dict[str, Any] = {**inputs, "max_new_tokens": 32, "tokenizer": tokenizer, "stop_strings": ["return"]}
        expected = _own(model, **asked)
        assert (
            tokenizer.decode(expected[0]).endswith("return") and expected.shape[1] < inputs["input_ids"].shape[1] + 32
        )
        assert model.generate(**asked).tolist() == expected.tolist() and through.taken() == 1
        config = GenerationConfig(max_new_tokens=32, stop_strings=asked.pop("stop_strings"))
        del asked["max_new_tokens"]
        assert model.generate(**asked, generation_config=config).tolist() == expected.tolist()
        before, model.generation_config = model.generation_config, copy.copy(model.generation_config)
        model.generation_config.stop_strings = "return"
        streamer = TextIteratorStreamer(tokenizer)
        thread = threading.Thread(target=model.generate, kwargs={**asked, "streamer": streamer, "max_new_tokens": 32})
        thread.start()
        assert "".join(streamer) == tokenizer.decode(expected[0])
        thread.join()
        model.generation_config = before
        assert through.taken() == 2 and config.stop_strings == ["return"]
        with pytest.raises(ValueError, match="tokenizer"):  # transformers' own
            model.generate(**inputs, stop_strings=["return"])
    finally:
        lp.restore(demo.model)


@DEMO
@pytest.mark.parametrize(
    "asked", [{}, {"stop_sequence": "return"}, {"batch_size": 2}, {"num_return_sequences": 2}], ids=str
)
def test_a_pipeline_goes_through_lp(demo: Loaded, through: Through, asked: dict[str, Any]) -> None:
    """A pipeline calls `model.generate`, with a generation config and the tokenizer."""
    pipe = pipeline("text-generation", model=demo.model, tokenizer=demo.tokenizer)
    texts = ["def add(a, b):\n", "class Stack:\n    def push(self, item):\n"]
    asked = {"max_new_tokens": 24, "do_sample": False, **asked}
    if "num_return_sequences" in asked:
        asked |= {"do_sample": True, "top_k": 1}
    expected = pipe(texts, **asked)
    assert not through
    lp.accelerate(demo.model, SHAPE)
    try:
        assert pipe(texts, **asked) == expected
        assert through.taken() == (1 if "batch_size" in asked else 2)
        assert pipe(texts, **asked, num_beams=2) and not through  # falls back
    finally:
        lp.restore(demo.model)


class _PerRow:
    """A processor that lp does not know."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(1, -1)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"num_beams": 2}, "num_beams is 2"),
        ({"generation_config": GenerationConfig(num_beams=3, max_new_tokens=4, pad_token_id=0)}, "num_beams is 3"),
        ({"use_cache": False}, "use_cache=False"),
        ({"guidance_scale": 1.5}, "guidance_scale is 1.5"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
        ({"encoder_repetition_penalty": 1.2}, "encoder_repetition_penalty is 1.2"),
        ({"logits_processor": [_PerRow()]}, "_PerRow is not known"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [3, 4]}, "PrefixConstrainedLogitsProcessor"),
        ({"watermarking_config": {"seeding_scheme": "selfhash"}}, "watermarking_config"),
        ({"attention_mask": torch.tensor([[1, 0] + [1] * 10])}, "zeros behind its first token"),
        ({"position_ids": torch.arange(12)[None] + 2}, "position_ids"),
        ({"max_new_tokens": CONTEXT}, f"the model's context {CONTEXT}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_what_lp_does_not_do_is_transformers_own(
    model: PreTrainedModel, through: Through, caplog: pytest.LogCaptureFixture, asked: dict[str, Any], why: str
) -> None:
    """Exactly transformers' result, and one line for a reason, however often it comes."""
    asked = asked if "generation_config" in asked else ASKED | asked

    def call(generate: Callable[..., Any]) -> Any:
        out = generate(IDS, **asked)
        return (out if isinstance(out, torch.Tensor) else out.sequences).tolist()

    with caplog.at_level(logging.WARNING):
        outputs = [call(model.generate) for _ in range(2)]
    assert outputs == [call(lambda *args, **given: _own(model, *args, **given))] * 2 and not through
    (line,) = _lines(caplog)
    assert line.startswith("this call of generate is transformers' own: ") and why in line


def test_a_cache_of_the_caller_s_is_filled(
    model: PreTrainedModel, through: Through, caplog: pytest.LogCaptureFixture
) -> None:
    """A chat of three turns over one cache: left empty, every turn would compute the whole text, and nobody said so."""

    def chat(generate: Callable[..., Any]) -> tuple[list[list[int]], int]:
        cache, ids = DynamicCache(config=model.config), IDS
        for _ in range(3):
            asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "pad_token_id": 0}
            out = generate(ids, **asked, **{cache_keyword(model): cache})
            ids = torch.cat([out, IDS[:, :2]], 1)
        return ids.tolist(), cache.get_seq_length()

    with caplog.at_level(logging.WARNING):
        text, held = chat(model.generate)
    assert (text, held) == chat(lambda *args, **given: _own(model, *args, **given)) and not through
    assert held == len(text[0]) - 3, "all but the last tokens, which nothing was computed of"
    (line,) = _lines(caplog)
    assert f"{cache_keyword(model)} is given" in line and "leave it out" in line
    assert model.generate(IDS, **ASKED, **{cache_keyword(model): None}).shape == (1, 28) and through.taken() == 1


def test_a_reason_is_told_once_whatever_numbers_are_in_it(
    model: PreTrainedModel, through: Through, caplog: pytest.LogCaptureFixture
) -> None:
    """One line a call, and a set of lines that grows, in a server where texts have any lengths."""
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            asked = {"max_new_tokens": 2, "pad_token_id": 0}
            model.generate(IDS, **asked, num_beams=number + 2)
            model.generate(IDS, **asked, guidance_scale=1.5 + number / 3)
            model.generate(IDS, **asked, encoder_repetition_penalty=[1.2, 1e-5, 3.0][number])
            model.generate(IDS, **asked, position_ids=torch.arange(12)[None] + number + 1)
            longer = CONTEXT - IDS.shape[1] + number + 1
            model.generate(IDS, pad_token_id=0, max_new_tokens=longer, stopping_criteria=[_Sums()])
            model.generate(IDS, **asked, prompt_lookup_num_tokens=number + 3)
    lines = _lines(caplog)
    assert through.taken() == 3 and len(lines) == 6, lines
    for name in (
        "num_beams is 2",
        "guidance_scale is 1.5",
        "is 1.2",
        "position_ids",
        f"{CONTEXT + 1}",
        "prompt_lookup",
    ):
        assert sum(name in line for line in lines) == 1, name
    assert isinstance(model.generate, Accelerated) and len(model.generate._told) == 6


def test_a_streamer_for_several_prompts_is_left_to_transformers(model: PreTrainedModel, through: Through) -> None:
    """Which refuses it too, in its own words."""
    two = IDS.expand(2, -1)
    with pytest.raises(ValueError, match="batch size 1"):
        from transformers import TextStreamer

        model.generate(two, max_new_tokens=4, streamer=TextStreamer(None))
    assert not through


def test_drafts_of_others_are_named_as_unused(
    model: PreTrainedModel, through: Through, caplog: pytest.LogCaptureFixture
) -> None:
    """lp drafts by itself; a batch, which assisted decoding refuses, is no obstacle then."""
    expected = _own(model, IDS, **ASKED).tolist()
    with caplog.at_level(logging.WARNING):
        assert model.generate(IDS, **ASKED, assistant_model=tiny_model("llama", 1).double()).tolist() == expected
        assert model.generate(IDS, **ASKED, prompt_lookup_num_tokens=3).tolist() == expected
        config = GenerationConfig(max_new_tokens=16, prompt_lookup_num_tokens=3, pad_token_id=0)
        assert model.generate(IDS, config).tolist() == expected
    assert through.taken() == 3 and config.prompt_lookup_num_tokens == 3
    lines = _lines(caplog)
    assert [line.split()[0] for line in lines] == ["assistant_model", "prompt_lookup_num_tokens"]
    assert all("unused: lp drafts by itself" in line for line in lines)


def test_a_custom_generate_is_the_caller_s(model: PreTrainedModel, through: Through) -> None:
    """Asked for by the caller, another way of decoding is not replaced."""
    seen = []

    def mine(model: Any, input_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        seen.append(others)
        return input_ids

    assert torch.equal(model.generate(IDS, **ASKED, custom_generate=mine), IDS) and len(seen) == 1 and not through


def test_a_model_that_lp_refuses(through: Through, caplog: pytest.LogCaptureFixture) -> None:
    """An encoder-decoder generates as before."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 61}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    expected = model.generate(IDS, max_new_tokens=5).tolist()
    with caplog.at_level(logging.WARNING):
        assert lp.accelerate(model).generate(IDS, max_new_tokens=5).tolist() == expected
    assert not through and "transformers' own" in caplog.records[-1].message


def test_a_refused_model_is_asked_once(through: Through, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked in every call, for a quarter of a second; until it is another one, or is accelerated again."""
    model: Any = lp.accelerate(tiny_model("llama").double(), SHAPE)
    expected = _own(model, IDS, **ASKED).tolist()
    passes: list[Any] = []

    def dishonoured(runner: Any) -> None:
        passes.append(runner.original)
        raise lp.UserError("LlamaForCausalLM does not honour a tree mask")

    def asked() -> bool:
        passes.clear()
        assert model.generate(IDS, **ASKED).shape == (1, 28)
        return bool(passes)

    changes: list[Callable[[], Any]] = [
        lambda: None,
        model.float,
        lambda: model.set_attn_implementation("eager"),
        model.double,
        lambda: lp.accelerate(model, SHAPE),
        lambda: lp.accelerate(lp.restore(model), SHAPE),
    ]
    with monkeypatch.context() as patched:
        patched.setattr("lp.models.runner.check_tree_mask", dishonoured)
        for change in changes:
            change()
            assert [asked() for _ in range(3)] == [True, False, False]
        assert not through
    assert not asked()
    assert lp.accelerate(model, SHAPE).generate(IDS, **ASKED).tolist() == expected and through.taken() == 1
    lp.restore(model)


def test_threads_share_a_decoder(model: PreTrainedModel, through: Through, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's first calls come at once, and a decoder holds what texts have in common."""
    made: list[Any] = []

    def noted(*settings: Any, **how: Any) -> lp.LookaheadDecoder:
        made.append(settings)
        time.sleep(0.05)  # for the other threads
        return lp.LookaheadDecoder(*settings, **how)

    monkeypatch.setattr("lp.integrations.accelerate.LookaheadDecoder", noted)
    expected, texts = _own(model, IDS, **ASKED).tolist(), []
    threads = [threading.Thread(target=lambda: texts.append(model.generate(IDS, **ASKED).tolist())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 4 and through.taken() == 4 and len(made) == 1


def test_restore_leaves_the_model_as_it_was() -> None:
    """Also one whose `generate` was replaced before; twice is as once."""
    model = tiny_model("llama")
    model.generate(IDS, **ASKED)  # transformers leaves a mark of its own
    before = dict(vars(model))
    for _ in range(2):
        assert lp.accelerate(model, SHAPE) is model
    model.generate(IDS, **ASKED)
    for _ in range(2):
        assert lp.restore(model) is model
    kept = {"_lp_lock", "_lp_honours_tree_mask"}  # the probe's verdict, which the next decoder takes
    assert vars(model).keys() - kept == before.keys() and model.generate.__func__ is type(model).generate
    assert inspect.signature(lp.accelerate(model).generate) == inspect.signature(tiny_model("llama").generate)
    lp.restore(model)
    mine = lambda *args, **others: "mine"  # noqa: E731
    model.generate = mine
    lp.accelerate(lp.accelerate(model))
    assert model.generate(IDS) == "mine"  # which lp would not be the same as
    assert lp.restore(model).generate is mine
    with pytest.raises(lp.UserError, match="it must be a loaded model"):
        lp.accelerate("gpt2")  # type: ignore[type-var]
    with pytest.raises(lp.UserError, match="Linear has no generate"):
        lp.accelerate(torch.nn.Linear(2, 2))


def _pickled(model: PreTrainedModel) -> Any:
    return pickle.loads(pickle.dumps(model))


def _saved(model: PreTrainedModel) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved], ids=["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_accelerated_for_itself(through: Through, copied: Callable[[PreTrainedModel], Any]) -> None:
    """Bound to the original, a copy with other weights would speak with the original's."""
    model = lp.accelerate(tiny_model("llama").double(), SHAPE)
    expected = model.generate(IDS, **ASKED).tolist()
    other = copied(model)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(1, 0))
    assert isinstance(other.generate, Accelerated) and other.generate.model is other
    assert other.generate(IDS, **ASKED).tolist() == _own(other, IDS, **ASKED).tolist() != expected
    assert model.generate(IDS, **ASKED).tolist() == expected and through.taken() == 3
    assert copy.deepcopy(model.generate).model is not model
    lp.restore(other)
    assert isinstance(model.generate, Accelerated)


def test_a_saved_model_is_plain(model: PreTrainedModel, tmp_path: Path) -> None:
    """`save_pretrained` after texts, whose weights may lie in another order."""
    expected = model.generate(IDS, **ASKED).tolist()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert "generate" not in vars(loaded) and loaded.generate(IDS, **ASKED).tolist() == expected


@pytest.mark.parametrize("kind", ["lora", "prompt tuning"])
def test_adapters(through: Through, kind: str) -> None:
    """LoRA goes through lp; prompt tuning, whose virtual tokens lp never sees, through PEFT, or they would be lost."""
    base = tiny_model("llama").double()
    base.generation_config.pad_token_id = 0
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules="all-linear")
    virtual = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    adapted: Any = peft.get_peft_model(base, lora if kind == "lora" else virtual).double().eval()
    asked = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 12}
    expected = adapted.generate(**asked).tolist()
    assert lp.accelerate(adapted, SHAPE).generate(**asked).tolist() == expected
    assert through.taken() == (kind == "lora")


def _lora(**fields: Any) -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules="all-linear", **fields)


def _adapted(config: Any) -> Any:
    base = tiny_model("llama").double()
    base.generation_config.pad_token_id = 0
    return peft.get_peft_model(base, config).double().eval()


def test_rows_with_adapters_of_their_own(through: Through, caplog: pytest.LogCaptureFixture) -> None:
    """PEFT takes `adapter_names` before transformers sees it, and leaves hooks for other rows than a step has."""
    adapted = _adapted(_lora())
    adapted.add_adapter("second", _lora())
    adapted.double().eval()
    two = IDS.expand(2, -1)
    asked = {"input_ids": two, "attention_mask": torch.ones_like(two), "max_new_tokens": 8}
    expected = adapted.generate(**asked, adapter_names=["default", "second"]).tolist()
    assert expected[0] != expected[1]
    with caplog.at_level(logging.WARNING):
        assert lp.accelerate(adapted, SHAPE).generate(**asked, adapter_names=["default", "second"]).tolist() == expected
    assert not through and "adapter_names is given" in _lines(caplog)[0]
    assert adapted.generate(**asked).tolist()[0] == expected[0] and through.taken() == 1


def test_an_adapter_that_comes_later(through: Through, caplog: pytest.LogCaptureFixture) -> None:
    """A decoder that is kept asked the model for its adapters once."""
    adapted = lp.accelerate(_adapted(_lora()), SHAPE)
    asked = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 8}
    first = adapted.generate(**asked).tolist()
    adapted.add_adapter("activated", _lora(alora_invocation_tokens=[9, 1]))
    adapted.double().set_adapter("activated")
    adapted.eval()
    with caplog.at_level(logging.WARNING):
        text = adapted.generate(**asked).tolist()
    assert text == _own(adapted, **asked).tolist() != first
    assert through.taken() == 1 and "activated LORA" in _lines(caplog)[0]
    adapted.set_adapter("default")
    adapted.delete_adapter("activated")
    assert adapted.generate(**asked).tolist() == first and through.taken() == 1


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_ranks_choose_alike(through: Through, kind: str) -> None:
    """All through lp or none, also where one rank alone has a reason: else some would wait for the others' messages."""
    two = IDS.expand(2, -1)
    model = tiny_model("llama").double() if kind == "plain" else _adapted(_lora())
    models = [copy.deepcopy(model) for _ in range(2)]

    def calls(model: Any, streamer: BaseStreamer | None = None) -> list[Any]:
        torch.manual_seed(0)  # of the process, whose threads these are
        given = {"max_new_tokens": 8, "pad_token_id": 0}
        return [
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **given, **asked).tolist()
            for ids, asked in (
                (two, {"streamer": streamer}),
                (IDS, {}),
                (two, {}),
                (IDS, {"num_beams": 2}),
                (two, {"streamer": streamer}),
                (IDS, {"do_sample": True}),
            )
        ]

    def run(context: lp.ParallelContext) -> list[Any]:
        accelerated = lp.accelerate(models[context.rank], SHAPE, context)
        return calls(accelerated, _Collected() if context.is_main else None)

    ranks = run_lockstep(2, run)
    assert ranks[0] == ranks[1] and ranks[0][:5] == calls(model)[:5]
    assert through == [1, 1, 2, 2, 1, 1]  # on both ranks each: neither the beams nor the streamer of one rank


def test_ranks_of_which_one_refuses_its_model(through: Through, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave the others in the collectives of making a decoder, as would one that has a decoder still."""
    models: list[Any] = [tiny_model("llama").double() for _ in range(2)]
    expected = _own(models[0], IDS, **ASKED).tolist()
    unfit: list[PreTrainedModel] = []

    def asked(model: PreTrainedModel, *settings: Any) -> Any:
        if any(model is each for each in unfit):
            raise lp.UserError("this rank's model is unfit")
        return runner_for(model, *settings)

    monkeypatch.setattr("lp.integrations.accelerate.runner_for", asked)

    def call(context: lp.ParallelContext) -> None:
        assert models[context.rank].generate(IDS, **ASKED).tolist() == expected

    def run(context: lp.ParallelContext) -> list[int]:
        lp.accelerate(models[context.rank], SHAPE, context)
        taken = []
        for change in (lambda: None, _forgotten, _unfit, unfit.clear, _otherwise):
            if context.is_main:
                change()
            exchange(context.ranks, "changing a model")
            call(context)
            exchange(context.ranks, "comparing texts")
            taken.append(len(through))
        return taken

    def _forgotten() -> None:
        models[0].generate.forget()

    def _unfit() -> None:
        unfit.append(models[0])
        _forgotten()

    def _otherwise() -> None:
        models[0].set_attn_implementation("eager")

    assert run_lockstep(2, run) == [[2, 4, 4, 4, 6]] * 2


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("LP_REAL_MODEL"), reason="LP_REAL_MODEL names no folder of a real model")
def test_a_real_chat_pipeline(through: Through) -> None:
    """A checkpoint with a chat template, its own generation config and a padding token."""
    folder = os.environ["LP_REAL_MODEL"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pipe = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
    chat = [{"role": "user", "content": "Name three colours."}]
    asked = {"max_new_tokens": 24, "do_sample": False}
    expected = pipe(chat, **asked)
    lp.accelerate(model)
    assert pipe(chat, **asked) == expected and through.taken() == 1
