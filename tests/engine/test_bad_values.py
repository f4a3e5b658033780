"""What a program may give by mistake: one ValueError that names it and what to give, never a traceback from within."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import lp
from lp.config import windowless
from lp.draft import registry
from lp.draft.source import DraftSource
from lp.draft.tree import DraftTree
from lp.engine.journal import Journal
from lp.errors import UserError
from lp.parallel.thread_ranks import run_lockstep
from lp.sampling.processors import BranchProcessors
from tests.support.tiny_models import plain_greedy, tiny_model
from tests.support.toy_grammar import ToyGrammar

IDS = [5, 3, 3, 3, 7]
FIXED = lp.LookaheadConfig(window_size=2, ngram_size=2, guess_set_size=4)


@pytest.fixture(scope="module")
def model() -> tf.PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def decoder(model: tf.PreTrainedModel) -> lp.LookaheadDecoder:
    return lp.LookaheadDecoder(model, FIXED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": 0.7}, r"sampling is 0\.7; give lp\.SamplingParams, or None for greedy"),
        ({"sampling": {"temperature": 1}}, r"sampling is \{'temperature': 1\}; give lp\.SamplingParams"),
        ({"logits_processor": tf.TemperatureLogitsWarper(0.5)}, "logits_processor is .*; give a list of transformers'"),
        ({"logits_processor": [5]}, "logits_processor has 5; give a list"),
        ({"stopping_criteria": tf.MaxTimeCriteria(3)}, "stopping_criteria is .*; give a list of transformers'"),
        ({"stopping_criteria": [5]}, "stopping_criteria has 5; give a list"),
        ({"on_tokens": 5}, "on_tokens is 5; give a function"),
        ({"grammar": "json"}, "grammar is 'json'; give one that lp.GrammarCompiler made"),
        ({"stop_strings": "x", "tokenizer": "demo"}, "tokenizer is 'demo'; give the model's"),
        ({"grammar": ToyGrammar(0, 5), "eos_token_id": [3, 10**6]}, "eos_token_id has 1000000, which ends no text"),
        ({"grammar": ToyGrammar(0, 5), "eos_token_id": -1}, "eos_token_id has -1, which ends no text"),
        ({"seed": -5}, r"seed is -5; it must be an integer in \[0, "),
        ({"seed": 2**63, "sampling": lp.SamplingParams(seed=1)}, "seed is 9223372036854775808; it must be"),
    ],
)
@pytest.mark.parametrize("call", ["generate", "generate_batch", "plain", "journal"])
def test_arguments_of_a_call(
    decoder: lp.LookaheadDecoder, call: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A journal refuses a grammar whatever it is."""
    if call == "journal" and "grammar" in options:
        message = "a journal can't go on under a grammar"
    with pytest.raises(UserError, match=message):
        if call == "generate":
            decoder.generate(IDS, 4, **options)
        elif call == "journal":
            Journal(tmp_path / "journal.jsonl", decoder.context).generate(decoder, IDS, 4, **options)
        elif call == "plain":
            lp.PlainDecoder(decoder.model).generate(IDS, 4, **options)
        else:
            decoder.generate_batch([IDS], 4, **options)


def test_none_is_no_processor_and_no_criterion(decoder: lp.LookaheadDecoder, tmp_path: Path) -> None:
    """As in transformers' `generate`."""
    tokens = plain_greedy(decoder.model, IDS, 8)
    none: dict[str, Any] = {"logits_processor": None, "stopping_criteria": None}
    assert decoder.generate(IDS, 8, **none).tokens == tokens
    assert [output.tokens for output in decoder.generate_batch([IDS], 8, **none)] == [tokens]
    journal = Journal(tmp_path / "journal.jsonl", decoder.context)
    assert journal.generate(decoder, IDS, 8, **none).tokens == tokens


def test_what_is_kept_of_a_cancelled_text(decoder: lp.LookaheadDecoder) -> None:
    """-2 took the last two tokens away."""
    with lp.Engine(decoder) as engine:
        handle = engine.submit(IDS, 8, eos_token_id=())
        engine.step()
        with pytest.raises(UserError, match="num_tokens is -2; it must be an integer >= 0"):
            engine.cancel(handle, -2)
        engine.run()
    assert len(handle.result().tokens) == 8


def test_a_top_k_beyond_any_vocabulary(decoder: lp.LookaheadDecoder) -> None:
    """2**64 was no number for a tensor."""
    texts = [decoder.generate(IDS, 8, lp.SamplingParams(seed=1, top_k=top_k)).tokens for top_k in (0, 61, 2**64)]
    assert texts[0] == texts[1] == texts[2]


def test_a_penalty_on_tokens_that_no_head_scores() -> None:
    """A prompt of these alone left no column of counts, and index -1."""
    model = tiny_model()
    wide = torch.nn.Embedding(70, model.get_input_embeddings().embedding_dim, dtype=model.dtype)
    model.set_input_embeddings(wide)
    sampling = lp.SamplingParams(temperature=0.0, repetition_penalty=1.3)
    for ids in ([65], [69, 65], [1, 65]):
        expected = lp.AutoregressiveDecoder(model).generate(ids, 8, sampling).tokens
        assert lp.LookaheadDecoder(model, FIXED).generate(ids, 8, sampling).tokens == expected


def test_how_plain_steps_are_launched(model: tf.PreTrainedModel) -> None:
    with pytest.raises(UserError, match="capture is 'x'; it must be one of auto, "):
        lp.PlainDecoder(model, capture="x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_times": 5}, "step_times is 5; give StepTimes"),
        ({"step_times": 5, "config": FIXED}, "step_times is 5; give StepTimes"),
        ({"capture": "x"}, "capture is 'x'; it must be one of auto, "),
        ({"context": 5}, "context is 5; give lp.ParallelContext"),
    ],
)
def test_arguments_of_a_decoder(model: tf.PreTrainedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lp.LookaheadDecoder(model, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adaptive": "false"}, "adaptive is 'false'; give True or False"),
        ({"ablation": {"learn": False}}, "ablation is {'learn': False}; give lp.Ablation"),
        ({"pool_scope": "session", "pool_file": 5}, "pool_file is 5; give a path"),
        ({"pool_model_ngrams": 5}, "pool_model_ngrams is 5; give a path"),
        ({"history": 5}, "history is 5; give a path, or None"),
        ({"history": "x", "pool_file": "x", "pool_scope": "session"}, "history and pool_file are both 'x'; give each"),
        ({"corpora": "a.corpus"}, "corpora is 'a.corpus'; give a list of files of `lp corpus build`"),
        ({"corpora": [5]}, "corpora is 5; give a list of paths"),
        ({"corpora": list("abcde")}, "give 4 at most, each once"),
        ({"corpora": ["a", "a"]}, r"corpora is \['a', 'a'\]; give 4 at most, each once"),
    ],
)
def test_fields_of_a_config(fields: dict[str, Any], message: str) -> None:
    """A string is true, whatever it says."""
    with pytest.raises(UserError, match=message):
        lp.LookaheadConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learn": "no"}, "learn is 'no'; give True or False"),
        ({"prompt_ngrams": None}, "prompt_ngrams is None; give True or False"),
        ({"kv_sync": "later"}, r"kv_sync is 'later'; it must be one of \['recompute', 'broadcast'\]"),
    ],
)
def test_fields_of_an_ablation(fields: dict[str, Any], message: str) -> None:
    """A study whose switch did nothing would measure nothing."""
    with pytest.raises(UserError, match=message):
        lp.Ablation(**fields)


def test_switches_of_other_libraries() -> None:
    """Numpy's, as a script that draws settings has them; what is stored reads the same on every rank."""
    adaptive = lp.LookaheadConfig(adaptive=1).adaptive  # type: ignore[arg-type]
    parts = lp.Ablation(learn=np.bool_(False), renoise=np.True_)  # type: ignore[arg-type]
    assert (parts.learn, parts.renoise, adaptive) == (False, True, True)
    assert {type(value) for value in (parts.learn, parts.renoise, adaptive)} == {bool}
    with pytest.raises(UserError, match=r"learn is array.*; give True or False"):
        lp.Ablation(learn=np.array([True]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequences": 2**70}, "max_sequences is 1180591620717411303424; it must be an integer in"),
        ({"cache_tokens": 2**70}, "cache_tokens is 1180591620717411303424; it must be an integer in"),
        ({"prefill_chunk": 2**70}, "prefill_chunk is 1180591620717411303424; it must be an integer in"),
        ({"reuse_prefixes": "no"}, "reuse_prefixes is 'no'; give True or False"),
    ],
)
def test_arguments_of_an_engine(decoder: lp.LookaheadDecoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lp.Engine(decoder, **({"cache_tokens": 1000} | options))


def test_the_largest_engine_that_may_be_asked_for(decoder: lp.LookaheadDecoder) -> None:
    """It is made, within the memory that there is, or its cache is too large for this machine."""
    lp.Engine(decoder, max_sequences=1 << 16, cache_tokens=1000)
    with pytest.raises(UserError, match="lower the engine's cache_tokens"):
        lp.Engine(decoder, cache_tokens=1 << 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": 5}, "inputs is 5; give a list of prompts"),
        ({"inputs": [IDS], "on_tokens": 5}, "on_tokens is 5; give a function"),
        ({"inputs": [IDS], "sequence": "a"}, "sequence is 'a'; it must be an integer"),
    ],
)
def test_arguments_of_a_batch(decoder: lp.LookaheadDecoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        decoder.generate_batch(max_new_tokens=4, **options)


@pytest.mark.parametrize("device", ["gpu", "cpu:x", 5])
def test_devices_that_are_not_there(device: Any) -> None:
    with pytest.raises(UserError, match=f"device is {device!r}, which torch does not have here"):
        lp.load("demo", device=device)


def test_device_0_is_no_cpu(tiny_folder: Path) -> None:
    """It is the first GPU in transformers; where there is none, that is said."""
    if torch.cuda.is_available():
        assert lp.load(tiny_folder, device=0).model.device == torch.device("cuda", 0)
    else:
        with pytest.raises(UserError, match="device is 0, which torch does not have here"):
            lp.load(tiny_folder, device=0)


def test_a_dtype_may_be_torchs_own(tiny_folder: Path) -> None:
    assert lp.load(tiny_folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16
    with pytest.raises(UserError, match="dtype is 'int8'; it must be one of"):
        lp.load(tiny_folder, dtype=torch.int8)


def test_what_is_no_grammar() -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    model, tokenizer = lp.load("demo")
    compiler = lp.GrammarCompiler(tokenizer, model.config.vocab_size)
    wrong: Any = 5
    with pytest.raises(UserError, match="regex is 5; give a regular expression as a string"):
        compiler.regex(wrong)
    with pytest.raises(UserError, match="ebnf is 5; give rules as a string"):
        compiler.ebnf(wrong)
    with pytest.raises(UserError, match="json_schema is no JSON"):
        compiler.json_schema({"a": {1}})
    with pytest.raises(UserError, match="tokenizer is 5; give the model's"):
        lp.GrammarCompiler(wrong, 4096)
    with pytest.raises(UserError, match="vocabulary is 'x'; it must be an integer"):
        lp.GrammarCompiler(tokenizer, "x")  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class _WrongConfig:
    """The config of a source that drafts a token which the model may not have, as a user's source could."""

    token: int = 0

    def shape(self) -> lp.LookaheadConfig:
        return windowless(4)


class _Wrong(DraftSource):
    def __init__(self, config: _WrongConfig, prompt: Any) -> None:
        self._token = config.token

    def propose(self, text: Any, budget: int, window: Any, price: Any) -> DraftTree:
        return DraftTree([self._token], [-1])


@pytest.fixture
def wrong_source() -> Iterator[None]:
    lp.register_source("test_wrong", _WrongConfig)(_Wrong)
    yield
    del registry._entries["test_wrong"]


@pytest.mark.parametrize("token", [-1, -(2**40), 2**40])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("wrong_source")
def test_a_source_that_drafts_what_is_no_token(model: tf.PreTrainedModel, ranks: int, token: int) -> None:
    """On a GPU the lookup of its embedding would end the process; every rank refuses it."""
    last = model.config.vocab_size - 1

    def generate(context: lp.ParallelContext) -> lp.GenerationOutput:
        return lp.LookaheadDecoder(model, _WrongConfig(token=token), context).generate(IDS, 8)

    with pytest.raises(UserError, match=rf"_Wrong proposed the token {token}; the model has 0\.\.{last}"):
        run_lockstep(ranks, generate)
    allowed = lp.LookaheadDecoder(model, _WrongConfig(token=last)).generate(IDS, 8)
    assert allowed.tokens == plain_greedy(model, IDS, 8)


def test_a_long_text_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every node: at 32k tokens of prompt and 200 nodes that took longer than the step."""
    module = importlib.import_module("lp.sampling.processors")
    converted = []
    honest = module.to_device

    def counting(values: Any, device: torch.device) -> torch.Tensor:
        tensor: torch.Tensor = honest(values, device)
        converted.append(tensor.numel())
        return tensor

    monkeypatch.setattr(module, "to_device", counting)
    branches = [[], [1], [2], [1, 1], [1, 2], None]
    scores = BranchProcessors([tf.RepetitionPenaltyLogitsProcessor(2.0)], [9, 9])(
        torch.ones(6, 10), branches, [3] * 500
    )
    assert sum(converted) == 502 + sum(map(len, filter(None, branches))) + 5  # the text, the branches, the nodes
    seen = [(row != 1).nonzero().flatten().tolist() for row in scores]
    assert seen == [[3, 9], [1, 3, 9], [2, 3, 9], [1, 3, 9], [1, 2, 3, 9], []]
