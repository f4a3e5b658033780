"""`continued`: tokens at the end of a prompt that an earlier call generated count as generated."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import lp
from lp.engine.journal import Journal
from lp.errors import UserError
from tests.support.image_models import IMAGE, image_model, image_prompt
from tests.support.tiny_models import VOCABULARY, tiny_model
from tests.support.toy_grammar import ToyGrammar

CONFIG = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=5)


@pytest.mark.parametrize("kind", [lp.LookaheadDecoder, lp.PlainDecoder, lp.AutoregressiveDecoder])
def test_a_grammar_goes_on(kind: Any) -> None:
    """It began anew behind the tokens that were generated under it."""
    model = tiny_model("llama", 3)
    decoder = kind(model, CONFIG) if kind is lp.LookaheadDecoder else kind(model)
    asked: dict[str, Any] = {"grammar": ToyGrammar(7, VOCABULARY), "eos_token_id": [0]}
    whole = decoder.generate([1, 2, 3], 24, **asked).tokens
    for count in (1, 8, len(whole) - 1):
        rest = decoder.generate([1, 2, 3, *whole[:count]], 24 - count, continued=count, **asked).tokens
        assert rest == whole[count:]


def test_tokens_that_a_grammar_forbids() -> None:
    decoder = lp.LookaheadDecoder(tiny_model("llama", 3), CONFIG)
    grammar = ToyGrammar(7, VOCABULARY)
    whole = decoder.generate([1, 2, 3], 8, grammar=grammar, eos_token_id=[0]).tokens

    def taken(token: int) -> bool:
        matcher = grammar.matcher([0])
        return matcher.accept(whole[0]) and matcher.accept(token)

    wrong = next(token for token in range(1, VOCABULARY) if not taken(token))
    with pytest.raises(UserError, match=rf"the grammar forbids the token {wrong} at place 1 of these"):
        decoder.generate([1, 2, whole[0], wrong], 8, grammar=grammar, eos_token_id=[0], continued=2)


def resumed(decoder: lp.Decoder, path: Path, ids: list[int], inputs: dict[str, Any], seed: int = 0) -> list[int]:
    """The text of a journal's second run, whose first one fails behind the second step or later."""
    sampling = lp.SamplingParams(temperature=3.0, seed=seed)
    steps = 0

    def cut(tokens: list[int], step: int) -> None:
        nonlocal steps
        steps += 1
        if steps > 14:
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        Journal(path, decoder.context).generate(decoder, ids, 40, sampling, on_tokens=cut, eos_token_id=(), **inputs)
    output = Journal(path, decoder.context).generate(decoder, ids, 40, sampling, eos_token_id=(), **inputs)
    assert output.resumed > 10
    return output.tokens


def test_a_mask_does_not_keep_a_journal_from_going_on(tmp_path: Path) -> None:
    """What a tokenizer gives besides token ids was held against the prompt with the tokens of the first run."""
    decoder = lp.LookaheadDecoder(tiny_model("llama", 3), CONFIG)
    inputs = {"attention_mask": torch.ones(1, 4, dtype=torch.long)}
    whole = decoder.generate([1, 2, 3, 4], 40, lp.SamplingParams(temperature=3.0, seed=0), eos_token_id=())
    assert resumed(decoder, tmp_path / "journal", [1, 2, 3, 4], inputs) == whole.tokens


@pytest.mark.parametrize("arch", ["llava", "gemma3", "qwen2_vl"])
def test_images_of_a_journals_text(arch: str, tmp_path: Path) -> None:
    """Token types had the prompt's length, and a generated token of an image's id was taken for an image's place."""
    decoder = lp.LookaheadDecoder(image_model(arch, 0), CONFIG)
    given = image_prompt(arch, 0, 1)
    ids = given.pop("input_ids")[0].tolist()
    for seed in itertools.count():
        sampling = lp.SamplingParams(temperature=3.0, seed=seed)
        whole = decoder.generate(ids, 40, sampling, eos_token_id=(), **given).tokens
        if IMAGE in whole[:10]:
            break
    assert resumed(decoder, tmp_path / "journal", ids, given, seed) == whole


def test_what_a_grammar_forces_is_drafted() -> None:
    """Drafts came from the grammar's beginning where the text stood in its middle: 42 steps for these texts, not 32."""
    config = lp.LookaheadConfig(window_size=0, ngram_size=4, guess_set_size=5)  # few drafts but the grammar's own
    decoder = lp.LookaheadDecoder(tiny_model("llama", 3), config)
    steps = most = 0
    for number in range(1, 8):
        asked: dict[str, Any] = {"grammar": ToyGrammar(number, VOCABULARY), "eos_token_id": [0]}
        whole = decoder.generate([1, 2, 3], 40, **asked)
        count = len(whole.tokens) // 2
        ids = [1, 2, 3, *whole.tokens[:count]]
        steps += decoder.generate(ids, 40 - count, continued=count, **asked).steps
        most += whole.steps
    assert steps <= most / 2, (steps, most)
