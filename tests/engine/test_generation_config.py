"""A checkpoint's generation config is followed by decoders as transformers' `generate` follows it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version
from transformers import GenerationConfig, PreTrainedModel

import lp
from lp.engine.journal import Journal
from lp.sampling.generation_config import FIELDS, CheckpointDefaults, Does, refusals
from tests.support.tiny_models import VOCABULARY, tiny_model

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 5, 9, 1, 2]
NEW = 24
# One of each field that changes scores, with a value under which the tiny model's text is another one.
SCORES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "suppress_tokens": {"suppress_tokens": [*range(0, VOCABULARY, 2)]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(1, VOCABULARY, 2)]},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(1, VOCABULARY, 3)]},
    "sequence_bias": {"sequence_bias": [[[token], 6.0] for token in range(1, VOCABULARY, 3)]},
    "min_length": {"min_length": len(PROMPT) + 15, "eos_token_id": [*range(0, VOCABULARY, 2)]},
    "min_new_tokens": {"min_new_tokens": 15, "eos_token_id": [*range(0, VOCABULARY, 2)]},
    "forced_eos_token_id": {"forced_eos_token_id": 7, "eos_token_id": 7},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 2.0), "eos_token_id": 7},
    "watermarking_config": {"watermarking_config": {"bias": 8.0, "seeding_scheme": "lefthash"}},
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
}
WARPERS: dict[str, dict[str, Any]] = {
    "do_sample": {},  # with transformers' own top_k, 50
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "top_h": {"top_h": 0.5},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.02},
}
SAME_TOKENS = ("renormalize_logits", "remove_invalid_values")  # which change scores alone, or nothing of a sound model


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return tiny_model("llama").double()


@pytest.fixture
def model(base: PreTrainedModel) -> Any:
    before = base.generation_config
    yield base
    base.generation_config = before


def _checkpoint(model: PreTrainedModel, **fields: Any) -> None:
    model.generation_config = GenerationConfig(pad_token_id=0, **fields)


def _generated(model: PreTrainedModel, **asked: Any) -> Any:
    asked = {"max_new_tokens": NEW, "attention_mask": torch.ones(1, len(PROMPT), dtype=torch.int64)} | asked
    return model.generate(torch.tensor([PROMPT]), **asked)


def _new(sequences: torch.Tensor) -> list[int]:
    return sequences[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", SCORES)
def test_greedy_text_is_that_of_generate(model: PreTrainedModel, name: str) -> None:
    """It was left out without a word by every decoder, and followed by custom_generate alone."""
    _checkpoint(model)
    unasked = _new(_generated(model))
    _checkpoint(model, **SCORES[name])
    expected = _new(_generated(model))
    assert (expected == unasked) == (name in SAME_TOKENS)
    assert lp.LookaheadDecoder(model).generate(PROMPT, NEW).tokens == expected
    assert lp.PlainDecoder(model).generate(PROMPT, NEW).tokens == expected
    assert lp.AutoregressiveDecoder(model).generate(PROMPT, NEW, generation_config="auto").tokens == expected
    assert lp.LookaheadDecoder(model).generate_batch([PROMPT, PROMPT[:5]], NEW)[0].tokens == expected
    assert _new(_generated(model, custom_generate=lp.generate)) == expected


@pytest.mark.parametrize("name", [*SCORES, *WARPERS])
def test_scores_of_sampled_text_are_those_of_generate(model: PreTrainedModel, name: str) -> None:
    """Scores of text that the checkpoint samples by default: where they miss a processor, `generate`'s differ."""
    fields = {"temperature": 0.8, "top_k": 0} if name in SCORES else {}
    _checkpoint(model, do_sample=True, **fields | {**SCORES, **WARPERS}[name])
    decoder = lp.LookaheadDecoder(model)
    output = decoder.generate(PROMPT, NEW, output_scores=True)
    assert output.seed is not None and output.scores is not None
    again = decoder.generate(PROMPT, NEW, seed=output.seed)
    assert (again.tokens, again.seed) == (output.tokens, output.seed)
    assert lp.AutoregressiveDecoder(model).generate(PROMPT, NEW, generation_config="auto", seed=output.seed).tokens == (
        output.tokens
    )
    asked = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True}
    bound = _generated(model, **asked, custom_generate=lp.generate, seed=output.seed)
    assert _new(bound.sequences) == output.tokens
    try:
        forced = _generated(model, **asked, prefix_allowed_tokens_fn=_along([*PROMPT, *output.tokens]))
    except RuntimeError as error:
        if name != "exponential_decay_length_penalty" or Version(tf.__version__) >= Version("5.18"):
            raise
        pytest.skip(f"transformers' own generate fails: {error}")
    assert _new(forced.sequences) == output.tokens
    # What generate's own processors leave of the forced token, where ours leave it among others.
    for scores, theirs, own in zip(output.scores, bound.scores, _processed(model, output.tokens), strict=True):
        torch.testing.assert_close(scores.float(), own[0].float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scores.float(), theirs[0].float(), rtol=1e-5, atol=1e-5)


def _along(text: list[int]) -> Any:
    return lambda batch, ids: [text[len(ids)]]


def _processed(model: PreTrainedModel, tokens: list[int]) -> list[torch.Tensor]:
    """Scores along a text, by the processors that `generate` makes and a pass of the model for each token."""
    seen: list[Any] = []

    def note(model: PreTrainedModel, input_ids: torch.Tensor, logits_processor: Any, **others: Any) -> torch.Tensor:
        seen.append(logits_processor)
        return input_ids

    _generated(model, custom_generate=note)
    scores = []
    for count in range(len(tokens)):
        ids = torch.tensor([[*PROMPT, *tokens[:count]]])
        with torch.no_grad():
            scores.append(seen[0](ids, model(ids).logits[:, -1].float()))
    return scores


def test_sampling_that_is_given_wins_in_its_fields_alone(model: PreTrainedModel) -> None:
    """Temperature, warpers and penalty are those of SamplingParams; suppressed tokens are still the checkpoint's."""
    odd = [*range(1, VOCABULARY, 2)]
    _checkpoint(model, do_sample=True, temperature=0.1, top_k=1, repetition_penalty=3.0, suppress_tokens=odd)
    sampling = lp.SamplingParams(temperature=0.9, seed=3)
    text = lp.LookaheadDecoder(model).generate(PROMPT, NEW, sampling)
    _checkpoint(model, suppress_tokens=odd)
    assert text.tokens == lp.LookaheadDecoder(model).generate(PROMPT, NEW, sampling).tokens
    assert text.seed == 3 and not {*text.tokens} & {*odd}
    _checkpoint(model)
    assert text.tokens != lp.LookaheadDecoder(model).generate(PROMPT, NEW, sampling).tokens


def test_none_and_the_oracle_leave_it_out(model: PreTrainedModel) -> None:
    """What tokens and speeds are compared with is plain decoding."""
    _checkpoint(model)
    expected = lp.LookaheadDecoder(model).generate(PROMPT, NEW).tokens
    _checkpoint(model, do_sample=True, repetition_penalty=1.5)
    output = lp.LookaheadDecoder(model).generate(PROMPT, NEW, generation_config="none")
    assert output.tokens == expected and output.seed is None
    assert lp.AutoregressiveDecoder(model).generate(PROMPT, NEW).tokens == expected
    with pytest.raises(lp.UserError, match="generation_config is 'vllm'; it must be 'auto' or 'none'"):
        lp.LookaheadDecoder(model).generate(PROMPT, NEW, generation_config="vllm")


def test_one_line_says_what_is_followed(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    """Once a decoder, with what lp does not do; and no line where there is nothing to say."""
    _checkpoint(model, repetition_penalty=1.5, temperature=0.3, num_beams=3)
    decoder = lp.LookaheadDecoder(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            decoder.generate(PROMPT, 4)
    (line,) = [record.message for record in caplog.records if record.name == "lp.engine.decoder"]
    assert "is followed: repetition_penalty=1.5;" in line and "num_beams is 3" in line and "none" in line
    caplog.clear()
    _checkpoint(model, temperature=0.3, use_cache=True, max_new_tokens=9)
    lp.LookaheadDecoder(model).generate(PROMPT, 4)
    assert not caplog.records


def test_a_checkpoint_that_transformers_refuses_is_named(model: PreTrainedModel) -> None:
    """A value that its processor does not take is an error of the checkpoint, with the way around it."""
    _checkpoint(model)
    model.generation_config.repetition_penalty = -2.0
    with pytest.raises(lp.UserError, match=r"generation_config can't be followed: .*-2.0.*generation_config='none'"):
        lp.LookaheadDecoder(model).generate(PROMPT, 4)


def test_padding_is_not_penalized(model: PreTrainedModel) -> None:
    """As of transformers: the pad token may come for the first time."""
    _checkpoint(model, repetition_penalty=1.6)
    ids = torch.tensor([[0] * 5 + PROMPT])
    mask = torch.tensor([[0] * 5 + [1] * len(PROMPT)])
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW)[0, ids.shape[1] :].tolist()
    assert lp.LookaheadDecoder(model).generate(PROMPT, NEW, padding=[0] * 5).tokens == expected


@pytest.mark.parametrize("fields", [{"begin_suppress_tokens": [*range(1, VOCABULARY, 2)]}, {"do_sample": True}])
def test_a_journal_goes_on_as_the_text_began(model: PreTrainedModel, tmp_path: Path, fields: dict[str, Any]) -> None:
    """The rest of a text is not its beginning, and its seed is the one that was drawn."""
    _checkpoint(model, **fields)
    decoder = lp.LookaheadDecoder(model)
    whole = Journal(tmp_path / "whole", decoder.context).generate(decoder, PROMPT, NEW)
    lines = (tmp_path / "whole").read_text().splitlines()
    (tmp_path / "cut").write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    journal = Journal(tmp_path / "cut", decoder.context)
    rest = journal.generate(decoder, PROMPT, NEW)
    assert rest.tokens == whole.tokens and 0 < rest.resumed < NEW
    assert (rest.seed is None) == ("do_sample" not in fields)


def test_every_field_of_transformers_has_an_entry() -> None:
    """A field that transformers adds would be ignored without a word."""
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert known <= FIELDS.keys(), f"say in FIELDS what lp does with {sorted(known - FIELDS.keys())}"
    for name, field in FIELDS.items():
        refuses = field.does is Does.REFUSED or field.refuses is not None
        assert refuses == bool(field.why), name
    assert {*SCORES, *WARPERS} - {"do_sample"} == {
        name for name, field in FIELDS.items() if field.does is Does.SCORES
    } - {"forced_bos_token_id"}  # which is for prompts of one token


def test_the_first_token_of_a_prompt_of_one_is_forced(model: PreTrainedModel) -> None:
    """Not the second one of the text: a prompt of one token is where it applies."""
    _checkpoint(model, forced_bos_token_id=11)
    expected = model.generate(torch.tensor([[5]]), max_new_tokens=9)[0, 1:].tolist()
    assert expected[0] == 11 == lp.LookaheadDecoder(model).generate([5], 9).tokens[0]
    assert lp.LookaheadDecoder(model).generate([5], 9).tokens == expected


def test_neutral_values_say_nothing() -> None:
    """Transformers' defaults, written out, are no request: decoding stays what it is without a generation config."""
    neutral = GenerationConfig(**GenerationConfig._get_default_generation_params())
    neutral.top_k = 50
    assert not CheckpointDefaults.of(neutral).said(None) and not CheckpointDefaults.of(neutral).left
    assert not CheckpointDefaults.of(GenerationConfig()).said(lp.SamplingParams())
    assert not refusals(neutral)
