"""`model.generate(custom_generate=lp.generate)` returns what `generate` itself would."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    QuantizedCache,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

import lp
from lp.models.releases import cache_keyword
from tests.support.tiny_models import drawn_text

LOOKAHEAD: dict[str, Any] = {"custom_generate": lp.generate, "window_size": 7, "ngram_size": 5, "guess_set_size": 7}
IDS = torch.tensor([[0, 0, 0, 5, 6, 7, 1, 2], [1, 2, 3, 4, 1, 2, 3, 4]])
MASK = (torch.arange(8)[None] >= torch.tensor([[3], [0]])).long()  # the first prompt is padded on the left


def _at_token(token: int) -> Callable[..., torch.Tensor]:
    """A criterion that ends a row at this token."""
    return lambda input_ids, scores, **kwargs: input_ids[:, -1] == token


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"repetition_penalty": 1.4},
        {"min_length": 20, "eos_token_id": 9},
        {"no_repeat_ngram_size": 3, "eos_token_id": [9, 11]},
        {"bad_words_ids": [[3], [4, 5]], "min_new_tokens": 9, "eos_token_id": 5},
        {"exponential_decay_length_penalty": (5, 1.1), "eos_token_id": 9},
        {"forced_eos_token_id": 3},
        {"suppress_tokens": [1, 2], "begin_suppress_tokens": [7]},
        {"sequence_bias": {(3,): 2.0, (4, 5): 5.0}},
        {"max_length": 30, "max_new_tokens": None},
    ],
    ids=str,
)
def test_greedy_batch_equals_generate(model: PreTrainedModel, asked: dict[str, Any]) -> None:
    """Processors must see the padded prefix of their own branch, and rows of a batch end on their own."""
    asked = {"max_new_tokens": 40, "attention_mask": MASK} | asked
    assert model.generate(IDS, **asked, **LOOKAHEAD).tolist() == model.generate(IDS, **asked).tolist()


class _Bans(RepetitionPenaltyLogitsProcessor):
    """The penalty, and never the last but one token again."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        penalized: torch.Tensor = super().__call__(input_ids, scores)
        return penalized.scatter(1, input_ids[:, -2:-1], -math.inf)


def test_a_subclass_of_the_penalty_stays_what_it_is(model: PreTrainedModel) -> None:
    """Replaced by transformers' own penalty for each prompt of the batch, it was left out without a word."""
    asked: dict[str, Any] = {"max_new_tokens": 40, "attention_mask": MASK}
    try:
        bans = [_Bans(1.4, prompt_ignore_length=torch.tensor([3, 0]))]
    except ValueError:
        bans = [_Bans(1.4, prompt_ignore_length=3)]  # an earlier release ignores as many tokens of every prompt
    expected = model.generate(IDS, **asked, logits_processor=bans).tolist()
    assert model.generate(IDS, **asked, **LOOKAHEAD, logits_processor=bans).tolist() == expected


@pytest.mark.parametrize("eos", [None, 50], ids="eos={}".format)
def test_criteria_and_dict(model: PreTrainedModel, eos: int | None) -> None:
    """The user's criteria end each row where `generate` ends it; return_dict_in_generate is honoured.

    Behind its end a row is padded if the model has an EOS, else it goes on with the batch: transformers' way.
    """
    asked: dict[str, Any] = {"max_new_tokens": 40, "attention_mask": MASK, "eos_token_id": eos}
    asked |= {"repetition_penalty": 1.4, "return_dict_in_generate": True, "output_scores": True}
    uneven = 0
    for token in (8, 40, 33, 13):
        expected = model.generate(IDS, **asked, stopping_criteria=[_at_token(token)])
        output = model.generate(IDS, **asked, **LOOKAHEAD, stopping_criteria=[_at_token(token)])
        assert output.sequences.tolist() == expected.sequences.tolist()
        new = expected.sequences[:, IDS.shape[1] :]
        assert new.shape[1] < 40 and (new[:, -1] == token).any()
        uneven += int((new[:, :-1] == token).any())
        if eos is None:
            torch.testing.assert_close(output.scores, expected.scores, rtol=1e-6, atol=1e-6)  # float32's roundings
    assert uneven == 4  # one row met it before the other


class _Shorter(MaxLengthCriteria):
    """Ends texts at 13 tokens, whatever its limit is."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 13)


class _Multiples(EosTokenCriteria):
    """Ends texts at tokens that are none of its own."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 3


@pytest.mark.parametrize("eos", [None, 53, [50, 33]], ids="eos={}".format)
@pytest.mark.parametrize(
    "criteria",
    [
        [MaxLengthCriteria(15)],
        [MaxLengthCriteria(70)],  # which takes the place of max_new_tokens
        [MaxLengthCriteria(3)],  # shorter than the prompt
        [MaxLengthCriteria(20), MaxLengthCriteria(15)],
        [EosTokenCriteria(36)],
        [EosTokenCriteria([36, 33])],
        [EosTokenCriteria(36), EosTokenCriteria(47)],
        [MaxLengthCriteria(30), EosTokenCriteria(36)],
        [_Shorter(60)],
        [_Multiples(36)],
    ],
)
def test_criteria_of_length_and_eos(
    model: PreTrainedModel, eos: int | list[int] | None, criteria: list[StoppingCriteria]
) -> None:
    """Left out as if they said what the generation config says, they let texts go on where `generate` ends them."""
    asked: dict[str, Any] = {"max_new_tokens": 40, "attention_mask": MASK, "eos_token_id": eos, "pad_token_id": 1}
    asked |= {"repetition_penalty": 1.4, "stopping_criteria": criteria}
    assert model.generate(IDS, **asked, **LOOKAHEAD).tolist() == model.generate(IDS, **asked).tolist()


def test_a_time_limit_lets_no_row_go_on(model: PreTrainedModel) -> None:
    """Rows run one after another, so time that is up for a row is up for the rest of it: padded, not run again."""
    asked: dict[str, Any] = {"max_new_tokens": 40, "attention_mask": MASK, "repetition_penalty": 1.4}
    given = {"max_time": 1e6, "stopping_criteria": [_at_token(8)]}
    ended = model.generate(IDS, **asked, **LOOKAHEAD, **given)[:, IDS.shape[1] :]
    for row, whole in zip(ended.tolist(), model.generate(IDS, **asked)[:, IDS.shape[1] :].tolist(), strict=True):
        end = whole.index(8) + 1
        assert row == whole[:end] + [0] * (len(row) - end)
    assert (ended[:, -1] == 0).any()


def test_stop_strings_as_a_criterion(tiny_folder: Path) -> None:
    """A StopStringCriteria ends every row where `generate` itself ends it with `stop_strings`, which raises here."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=0)
    ids = torch.randint(1, len(tokenizer), (2, 9))
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "repetition_penalty": 1.3}
    new = model.generate(ids, **asked)[:, 9:]
    for row, at, length in [(0, 5, 4), (1, 10, 2), (0, 40, 9), (1, 25, 1)]:
        stop = tokenizer.decode(new[row])[at : at + length]
        expected = model.generate(ids, **asked, stop_strings=[stop, "absent"], tokenizer=tokenizer)
        criteria = [StopStringCriteria(tokenizer, [stop, "absent"])]
        assert model.generate(ids, **asked, **LOOKAHEAD, stopping_criteria=criteria).tolist() == expected.tolist()
        assert (expected[row, 9:] != 0).sum() < 40, stop
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(ids, **asked, **LOOKAHEAD, stop_strings=["a"], tokenizer=tokenizer)


def test_sampling_reproduces_and_rows_differ(model: PreTrainedModel) -> None:
    """One seed gives one text, whatever the window; sequences of one batch must not share their noise."""
    asked: dict[str, Any] = {
        "max_new_tokens": 30,
        "attention_mask": MASK[1:],
        "do_sample": True,
        "top_p": 0.9,
        "seed": 4,
    }
    several = model.generate(IDS[1:], **asked, **LOOKAHEAD, num_return_sequences=3)
    assert several.shape == (3, 38)
    assert len({tuple(row) for row in several.tolist()}) == 3
    without = LOOKAHEAD | {"window_size": 0, "guess_set_size": 0}
    assert model.generate(IDS[1:], **asked, **without, num_return_sequences=3).tolist() == several.tolist()
    params = lp.SamplingParams(top_p=0.9, top_k=model.generation_config.top_k or 50, seed=4)
    assert lp.AutoregressiveDecoder(model).generate(IDS[1], 30, params).tokens == several[0, 8:].tolist()


def test_streamer_bound_in_the_callable(model: PreTrainedModel) -> None:
    """transformers keeps the streamer to itself; bound, it gets the prompt and every token once."""

    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.ids: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.ids += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Collect()
    bound = functools.partial(lp.generate, streamer=streamer, window_size=5)
    out = model.generate(IDS[1:], attention_mask=MASK[1:], max_new_tokens=20, custom_generate=bound)
    assert streamer.ids == out[0].tolist() and streamer.ended


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"num_beams": 2}, "num_beams is 2; lookahead decoding verifies one path"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"use_cache": False}, "use_cache=False"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(model: PreTrainedModel, asked: dict[str, Any], name: str) -> None:
    """Ignored, these would give another text than the caller asked for."""
    config = GenerationConfig(max_new_tokens=8, pad_token_id=0, **asked)
    with pytest.raises(ValueError, match=name):
        model.generate(IDS[1:], generation_config=config, attention_mask=MASK[1:], custom_generate=lp.generate)


@pytest.mark.parametrize(
    ("ids", "asked", "name"),
    [
        ([1, 0, 3, 4], {}, "prompt 0 has zeros"),
        ([1, 2, 3, 0], {}, "prompt 0 has zeros"),
        ([1, 2, 3, 4], {"attention_mask": torch.tensor([[0, 0, 0, 0]])}, "prompt 0 has zeros"),
        ([1, 2, 3, 4], {"position_ids": torch.arange(4)[None] + 3}, "leave position_ids out"),
        ([], {"inputs_embeds": torch.zeros(1, 4, 32)}, "takes no inputs_embeds"),
        ([1, 2, 3, 4], {"cu_seq_lens_q": [0, 4]}, "takes no cu_seq_lens_q"),
        *(
            ([1, 2, 3, 4], {"attention_mask": torch.tensor([mask])}, f"covers {len(mask)} tokens, the prompt has 4")
            for mask in ([1] * 6, [0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1], [0, 1, 1])
        ),
    ],
    ids=str,
)
def test_what_is_not_a_left_padded_prompt_is_refused(
    model: PreTrainedModel, ids: list[int], asked: dict[str, Any], name: str
) -> None:
    """Input that is no left-padded prompt: transformers' tokens are not the prompt's there, so lp may not guess."""
    asked = {"input_ids": torch.tensor([ids])} | asked if ids else asked
    with pytest.raises(ValueError, match=name):
        model.generate(**asked, max_new_tokens=8, **LOOKAHEAD)


def test_a_pad_token_that_is_meant(model: PreTrainedModel) -> None:
    """The remedy of that error."""
    ids = torch.tensor([[1, 0, 3, 4, 0]])
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    expected = model.generate(ids, **asked)
    assert torch.equal(model.generate(ids, **asked, **LOOKAHEAD), expected)


def test_a_given_cache(model: PreTrainedModel) -> None:
    """KV of this text or of another: transformers goes on behind it, which was ignored; an empty one is like none."""
    rng = random.Random(3)
    fixed = {"max_new_tokens": 12, **LOOKAHEAD}
    keyword = cache_keyword(model)
    for kind in (DynamicCache, lambda **given: StaticCache(max_cache_len=64, **given)):
        cache = kind(config=model.config)
        ids = torch.tensor([drawn_text(rng, 9)])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
        given = {"attention_mask": torch.ones_like(ids), keyword: cache}
        assert torch.equal(model.generate(ids, **given, **fixed), expected)
        assert cache.get_seq_length() == 0, "transformers' own empty one looks the same"
        other = torch.tensor([drawn_text(rng, held := rng.randint(1, 8))])
        model(other, **{keyword: cache})
        for asked in (given, {keyword: cache}, given | {"attention_mask": torch.ones(1, 9 + held)}):
            with pytest.raises(ValueError, match=f"{keyword} holds {held} tokens.*leave it out"):
                model.generate(ids, **asked, **fixed)


@pytest.mark.parametrize("implementation", [None, "dynamic", "offloaded", "static"])
def test_caches_that_transformers_makes(model: PreTrainedModel, implementation: str | None) -> None:
    """They are empty and go unused."""
    asked: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 12}
    if implementation == "offloaded":
        try:
            torch.Stream()
        except RuntimeError as error:
            pytest.skip(f"transformers makes no such cache here: {error}")
    out = model.generate(IDS, **asked, **LOOKAHEAD, cache_implementation=implementation)
    assert torch.equal(out, model.generate(IDS, **asked))


def test_a_quantized_cache_is_refused(model: PreTrainedModel) -> None:
    """It rounds KV in blocks of tokens, and so gives another text; the error names what rounds it token by token."""
    cache = object.__new__(QuantizedCache)  # its backends are packages of their own
    Cache.__init__(cache, layers=DynamicCache(config=model.config).layers)
    with pytest.raises(ValueError, match="leave cache_implementation out and give kv_dtype="):
        model.generate(IDS, attention_mask=MASK, max_new_tokens=12, **LOOKAHEAD, **{cache_keyword(model): cache})
