"""transformers' `pipeline("text-generation")` with `custom_generate=lp.generate` and the demo model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from transformers import Pipeline, StopStringCriteria, TextIteratorStreamer, pipeline

import lp
from lp.models.loader import DEMO_MODEL, Loaded, load

pytestmark = pytest.mark.skipif(
    not (DEMO_MODEL / "model.safetensors").exists(), reason="the demo model's weights are not in this checkout"
)
TEXTS = ["def add(a, b):\n", "class Stack:\n    def push(self, item):\n"]  # of different lengths
LOOKAHEAD: dict[str, Any] = {"custom_generate": lp.generate, "window_size": 4, "ngram_size": 3, "guess_set_size": 6}
NEW = 32


@pytest.fixture(scope="module")
def demo() -> Loaded:
    return load("demo", "float64")  # no near-ties


@pytest.fixture(scope="module")
def pipe(demo: Loaded) -> Pipeline:
    return pipeline("text-generation", model=demo.model, tokenizer=demo.tokenizer)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"return_full_text": False, "repetition_penalty": 1.2},
        {"return_tensors": True},
        {"batch_size": 2, "no_repeat_ngram_size": 4},
    ],
    ids=str,
)
def test_greedy_records_equal_the_pipelines_own(pipe: Pipeline, asked: dict[str, Any]) -> None:
    """The pipeline hands its keywords on in its own way, pads batches, and cuts the prompt off again."""
    asked = {"max_new_tokens": NEW, "do_sample": False} | asked
    records = pipe(TEXTS, **asked, **LOOKAHEAD)
    assert records == pipe(TEXTS, **asked)
    assert len(records) == 2 and records[0] != records[1]


def test_set_once_for_every_call(demo: Loaded, pipe: Pipeline) -> None:
    """The shape may be given where the pipeline is made."""
    made = pipeline("text-generation", model=demo.model, tokenizer=demo.tokenizer, **LOOKAHEAD)
    greedy: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    assert made(TEXTS[0], **greedy) == pipe(TEXTS[0], **greedy)


def test_sampled_text_is_the_oracles(demo: Loaded, pipe: Pipeline) -> None:
    """The pipeline has sampling defaults of its own, temperature 0.7 among them; they must reach every branch."""
    (record,) = pipe(TEXTS[0], max_new_tokens=NEW, do_sample=True, seed=5, return_tensors=True, **LOOKAHEAD)
    ids = demo.tokenizer(TEXTS[0])["input_ids"]
    params = lp.SamplingParams(temperature=0.7, top_k=50, seed=5)
    assert record["generated_token_ids"] == ids + lp.AutoregressiveDecoder(demo.model).generate(ids, NEW, params).tokens
    several = pipe(TEXTS[0], max_new_tokens=NEW, do_sample=True, seed=5, num_return_sequences=2, **LOOKAHEAD)
    assert several[0]["generated_text"] == demo.tokenizer.decode(record["generated_token_ids"])
    assert several[1] != several[0]


@pytest.mark.parametrize("asked", [{"do_sample": False}, {"do_sample": True, "seed": 5}], ids=str)
def test_a_streamer_bound_in_the_callable(demo: Loaded, pipe: Pipeline, asked: dict[str, Any]) -> None:
    """What streams is what is returned, and the stream ends; the pipeline keeps a streamer of its own to itself."""
    streamer = TextIteratorStreamer(demo.tokenizer, skip_prompt=True, timeout=5)
    bound = LOOKAHEAD | {"custom_generate": functools.partial(lp.generate, streamer=streamer)}
    (record,) = pipe(TEXTS[1], max_new_tokens=NEW, return_full_text=False, **asked, **bound)
    assert "".join(streamer) == record["generated_text"] != ""


def test_stop_strings_as_a_ready_made_criterion(demo: Loaded, pipe: Pipeline) -> None:
    """`stop_sequence=` fails inside transformers with any custom_generate; the criterion does the same."""
    greedy: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "return_full_text": False}
    (whole,) = pipe(TEXTS[0], **greedy)
    stop = whole["generated_text"][12:19]
    (expected,) = pipe(TEXTS[0], stop_sequence=stop, **greedy)
    criteria = [StopStringCriteria(demo.tokenizer, [stop])]
    (record,) = pipe(TEXTS[0], stopping_criteria=criteria, **greedy, **LOOKAHEAD)
    assert record == expected
    assert stop in record["generated_text"] and len(record["generated_text"]) < len(whole["generated_text"])


def test_scores_in_the_records(pipe: Pipeline) -> None:
    """The pipeline stacks and regroups the tuple, so its shapes must be transformers' own."""
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    (expected,) = pipe(TEXTS[0], output_scores=True, **asked)
    (record,) = pipe(TEXTS[0], output_scores=True, **asked, **LOOKAHEAD)
    assert len(record["scores"]) == 4
    for row, other in zip(record["scores"], expected["scores"], strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-6)  # float64 logits, rounded to float32
