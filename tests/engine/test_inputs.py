"""Prompts, counts and token ids as numpy and torch have them, and wrong types: taken exactly, or a ValueError."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import lp
from launch.bench.step_profile import Plan
from lp import PaperConfig, PromptLookupConfig, RecyclingConfig, SuffixConfig
from lp.engine.journal import Journal
from lp.parallel.thread_ranks import run_lockstep
from lp.sampling.processors import plain_settings
from tests.support.tiny_models import plain_greedy, tiny_model

IDS = [5, 6, 7, 1, 2, 3, 9, 12]


@pytest.fixture(scope="module")
def model() -> tf.PreTrainedModel:
    model = tiny_model()
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def decoder(model: tf.PreTrainedModel) -> lp.LookaheadDecoder:
    return lp.LookaheadDecoder(model)


PROMPTS: dict[str, Any] = {
    "array": np.array(IDS),
    "array of 32 bits": np.array(IDS, np.uint8),
    "2-D array": np.array([IDS]),
    "2-D tensor": torch.tensor([IDS]),
    "tuple": tuple(IDS),
    "list of numpy's ints": list(np.array(IDS)),
    "list of tensors": list(torch.tensor(IDS)),
    "list of one array": [np.array(IDS)],
    "list of one tensor": [torch.tensor(IDS)],
    "range": range(5, 13),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts(model: tf.PreTrainedModel, decoder: lp.LookaheadDecoder, kind: str) -> None:
    prompt = PROMPTS[kind]
    ids = list(prompt) if kind == "range" else IDS
    assert decoder.generate(prompt, 12).tokens == plain_greedy(model, ids, 12)
    assert lp.AutoregressiveDecoder(model).generate(prompt, 12).tokens == plain_greedy(model, ids, 12)


WRONG: dict[str, tuple[Any, str]] = {
    "0-D array": (np.array(5), r"input_ids is array\(5\), no sequence of token ids; give them as"),
    "0-D tensor": (torch.tensor(5), "no sequence of token ids"),
    "numpy's int": (np.int64(5), "no sequence of token ids"),
    "int": (5, "no sequence of token ids"),
    "None": (None, "no sequence of token ids"),
    "text": ("x = 1", r"input_ids is 'x = 1'; give token ids, as in tokenizer\(text\)"),
    "a tokenizer's dict": ({"input_ids": [1, 2]}, r"give token ids, as in tokenizer\(text\)\[\"input_ids\"\]"),
    "two prompts": (np.array([IDS, IDS]), "holds 2 prompts"),
    "two prompts of one token": ([torch.tensor([5]), torch.tensor([6])], "holds 2 prompts"),
    "3-D": (np.array([[IDS]]), r"token id \[5, 6"),
    "floats": (np.array([5.0]), "token id 5.0"),
    "words": (["x"], "token id 'x'"),
    "bools": ([True, False], "token id True"),
    "no tokens": (np.zeros((1, 0), int), "the prompt is empty"),
    "no rows": (np.zeros((0, 4), int), "the prompt is empty"),
    "outside": (np.array([61]), "token id 61; this model's vocabulary is 0..60"),
    "below": (np.array([-1]), "token id -1"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_prompts(decoder: lp.LookaheadDecoder, kind: str) -> None:
    prompt, message = WRONG[kind]
    with pytest.raises(ValueError, match=message):
        decoder.generate(prompt, 4)


@pytest.mark.parametrize("integer", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_counts(model: tf.PreTrainedModel, decoder: lp.LookaheadDecoder, integer: Any) -> None:
    """Counts as numpy's and torch's integers: noise of sequence 3 must be that of Python's own 3."""
    sampling = lp.SamplingParams(seed=4, top_k=40)
    own = decoder.generate(IDS, 12, sampling, sequence=3, padding=[0, 0]).tokens
    given = lp.SamplingParams(seed=integer(4), top_k=integer(40))
    assert given == sampling and repr(given) == repr(sampling)
    asked: dict[str, Any] = {"prefill_chunk": integer(3), "sequence": integer(3), "padding": [integer(0), integer(0)]}
    assert decoder.generate(IDS, integer(12), given, **asked).tokens == own
    ids = torch.tensor([IDS])
    bound = functools.partial(lp.generate, window_size=integer(5), ngram_size=integer(3), guess_set_size=integer(4))
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, custom_generate=bound)
    assert out[0, len(IDS) :].tolist() == plain_greedy(model, IDS, 12)


@pytest.mark.parametrize(
    "config", [lp.LookaheadConfig, PaperConfig, PromptLookupConfig, RecyclingConfig, SuffixConfig, Plan]
)
def test_configs_have_plain_numbers(config: Any) -> None:
    """Ranks compare what their configs read as, and a journal names a text by it."""

    def as_numpy(value: Any) -> Any:
        if isinstance(value, bool):
            return value
        if isinstance(value, tuple):
            return tuple(map(as_numpy, value))
        return np.int32(value) if isinstance(value, int) else np.float64(value) if isinstance(value, float) else value

    own = config()
    fields = {item.name: as_numpy(getattr(own, item.name)) for item in dataclasses.fields(own)}
    made = config(**fields)
    assert made == own and repr(made) == repr(own)


@pytest.mark.parametrize("wrong", [np.array([5, 6]), np.float64(5), "5", 5.0, True, np.True_, None, torch.ones(1)])
def test_wrong_counts(decoder: lp.LookaheadDecoder, wrong: Any) -> None:
    for name in ("max_new_tokens", "prefill_chunk", "sequence"):
        with pytest.raises(ValueError, match=f"{name} is .*; it must be an integer"):
            decoder.generate(IDS, **{name: wrong})
    if wrong is None:
        return  # leaves W to the config
    with pytest.raises(ValueError, match=r"window_size \(W\) is .*; it must be an integer in \[0, 4096\]"):
        lp.LookaheadConfig(window_size=wrong)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "typical_p", "repetition_penalty"])
def test_wrong_numbers_of_sampling(name: str) -> None:
    """min_p was compared before its type was looked at, which was a TypeError."""
    for wrong in ("0.5", None, [0.5], True, float("nan"), np.nan, 1j, np.array([0.5, 0.2]), 10**400, -1):
        with pytest.raises(ValueError, match=f"{name} is .*; it must be (0, which is greedy, or )?a number"):
            lp.SamplingParams(**{name: wrong})
    made = lp.SamplingParams(**{name: np.float32(0.5)})
    assert repr(made) == repr(lp.SamplingParams(**{name: 0.5}))


def test_eos(model: tf.PreTrainedModel, decoder: lp.LookaheadDecoder) -> None:
    """An array's or a tensor's elements, or numpy's ints in a list, are ints like any other."""
    whole = plain_greedy(model, IDS, 20)
    eos = whole[7]
    ended = whole[: whole.index(eos) + 1]
    arrays = [np.array(eos), np.array([eos]), np.array([[60, eos]]), np.int64(eos), np.uint8(eos)]
    for given in (
        *arrays,
        eos,
        [eos],
        {eos},
        [np.int64(eos)],
        {np.int32(eos)},
        (i for i in [eos]),
        torch.tensor(eos),
        torch.tensor([eos]),
        [torch.tensor(eos)],
    ):
        assert decoder.generate(IDS, 20, eos_token_id=given).tokens == ended
    for none in ((), [], np.array([], int)):
        assert decoder.generate(IDS, 20, eos_token_id=none).tokens == whole
    for wrong in ("7", 7.0, np.array([7.0]), [None], True):
        with pytest.raises(ValueError, match=r"eos_token_id has .*; give one token id or several"):
            decoder.generate(IDS, 20, eos_token_id=wrong)


def test_a_journal_tells_arrays_apart(model: tf.PreTrainedModel, decoder: lp.LookaheadDecoder, tmp_path: Path) -> None:
    """Two EOS of numpy's are two texts; a prompt is the same one as an array."""
    whole = plain_greedy(model, IDS, 20)
    for prompt in (IDS, np.array([IDS])):
        journal = Journal(tmp_path / "journal", decoder.context)
        for eos in (whole[3], whole[9]):
            for kind in (np.int64, np.atleast_1d):
                expected = whole[: whole.index(eos) + 1]
                assert journal.generate(decoder, prompt, np.int64(20), eos_token_id=kind(eos)).tokens == expected
    assert journal.generate(decoder, prompt, 20, eos_token_id=np.int64(eos)).steps == 0


PROCESSORS: dict[str, Any] = {
    "top_h": lambda: tf.TopHLogitsWarper(0.6),
    "watermark": lambda: tf.WatermarkLogitsProcessor(61, "cpu", bias=4.0),
    "watermark of three": lambda: tf.WatermarkLogitsProcessor(61, "cpu", bias=4.0, context_width=3),
    "codebooks": lambda: tf.AlternatingCodebooksLogitsProcessor(len(IDS), 30, 15),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_processors_of_prefix_and_scores(model: tf.PreTrainedModel, kind: str) -> None:
    """Each changes the text, and is applied branch by branch as `generate` applies it."""
    ids = torch.tensor([IDS])
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30}
    fixed = functools.partial(lp.generate, window_size=5, ngram_size=4, guess_set_size=5)
    plain = lp.AutoregressiveDecoder(model)
    for seed in range(3):
        sampling = lp.SamplingParams(seed=seed, temperature=0.9)
        expected = plain.generate(IDS, 30, sampling, logits_processor=[PROCESSORS[kind]()]).tokens
        sampled = functools.partial(fixed, seed=seed)
        own = {"do_sample": True, "temperature": 0.9, "top_k": 0, "logits_processor": [PROCESSORS[kind]()]}
        assert model.generate(ids, **asked, **own, custom_generate=sampled)[0, len(IDS) :].tolist() == expected
    assert expected != plain.generate(IDS, 30, sampling).tokens
    expected = plain_greedy(model, IDS, 30, logits_processor=[PROCESSORS[kind]()])
    out = model.generate(ids, **asked, logits_processor=[PROCESSORS[kind]()], custom_generate=fixed)
    assert out[0, len(IDS) :].tolist() == expected


def test_top_h_as_an_argument_of_generate(model: tf.PreTrainedModel) -> None:
    """transformers makes the warper by itself, behind temperature and before top_p."""
    ids = torch.tensor([IDS])
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": True}
    asked |= {"top_h": 0.5, "top_k": 0}
    texts = {
        tuple(model.generate(ids, **asked, seed=3, custom_generate=lp.generate, **shape)[0].tolist())
        for shape in ({}, {"window_size": 0, "guess_set_size": 0}, {"window_size": 5, "ngram_size": 4})
    }
    plain = lp.AutoregressiveDecoder(model)
    made = [tf.TopHLogitsWarper(0.5)]
    expected = plain.generate(IDS, 30, lp.SamplingParams(seed=3), logits_processor=made).tokens
    assert texts == {(*IDS, *expected)}


def test_processors_of_more_than_that_are_refused(decoder: lp.LookaheadDecoder) -> None:
    """State from call to call, rows of a batch, or a green list that may be empty among rows that nobody chooses."""
    ids = torch.tensor([IDS])
    refused = [
        tf.SynthIDTextWatermarkLogitsProcessor(5, [3, 4], 128, 0, 128, torch.device("cpu")),
        tf.WatermarkLogitsProcessor(61, "cpu", seeding_scheme="selfhash"),
        tf.EncoderRepetitionPenaltyLogitsProcessor(1.3, ids),
        tf.EncoderNoRepeatNGramLogitsProcessor(2, ids),
        tf.PrefixConstrainedLogitsProcessor(lambda batch, sent: [1, 2], 1),
        tf.ClassifierFreeGuidanceLogitsProcessor(1.5),
    ]
    for processor in refused:
        with pytest.raises(ValueError, match=type(processor).__name__):
            decoder.generate(IDS, 4, logits_processor=[processor])


def test_settings_of_a_processor_read_the_same() -> None:
    """Arrays by what they hold, large ones by a digest."""
    few, many = torch.tensor([1, 2]), torch.arange(5000).bfloat16()
    assert plain_settings({"a": np.array([1, 2]), "b": np.int64(3), "c": few}) == [
        ("a", [1, 2]),
        ("b", 3),
        ("c", [1, 2]),
    ]
    assert plain_settings([True, 0.5, "b", None, object()]) == [True, 0.5, "b", None, "object"]
    assert plain_settings(many) == plain_settings(many.clone()) != plain_settings(many + 1000)
    assert len(plain_settings(many)) == 64


class _WithSetting(tf.LogitsProcessor):
    """Changes nothing."""

    per_branch = True

    def __init__(self, setting: Any) -> None:
        self.setting = setting

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def _cycle() -> list[Any]:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    return cycle


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: {3, "a", (1, 2), None}, ["a", 3, None, [1, 2]]),
        (lambda: {1: 2, "1": "x"}, [("1", "x"), ("1", 2)]),
        (_cycle, [1, [("again", "...")]]),
        (lambda: torch.tensor([0.0, 0.0, 2.0]).to_sparse(), [[3], [[2]], [2.0]]),
    ],
    ids=["set", "dict", "cycle", "sparse"],
)
def test_odd_settings_of_a_processor_are_no_errors(make: Any, plain: Any) -> None:
    """A processor that works was refused with a TypeError from within, on one rank too, where nothing is compared."""
    setting = make()
    assert plain_settings(setting) == plain
    model = tiny_model()
    expected = plain_greedy(model, IDS, 5)

    def body(context: lp.ParallelContext) -> list[int]:
        decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=2, ngram_size=2), context)
        return decoder.generate(IDS, 5, logits_processor=[_WithSetting(setting)]).tokens

    assert run_lockstep(2, body) == [expected] * 2


def test_one_rank_reads_no_settings() -> None:
    """It has nobody to compare them with, and they may be of any kind."""

    class Unreadable(dict[str, int]):
        def items(self) -> Any:
            raise NotImplementedError

    model = tiny_model()
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=2, ngram_size=2))
    output = decoder.generate(IDS, 5, logits_processor=[_WithSetting(Unreadable(a=1))])
    assert output.tokens == plain_greedy(model, IDS, 5)


@pytest.mark.parametrize("make", [lp.LookaheadDecoder, lp.AutoregressiveDecoder])
def test_a_name_is_no_model(make: Any) -> None:
    """What a newcomer tries first must not end in an AttributeError."""
    with pytest.raises(lp.UserError, match=r"model is 'demo'; it must be a loaded model.*lp\.load"):
        make("demo")
