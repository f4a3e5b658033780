"""A real model's texts in float32, in the long form: those of transformers' `generate`, or of plain decoding.

LP_REAL_MODEL names the model's folder (`bash scripts/real_model.sh FOLDER`).
"""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers as tf

import lp
from launch.bench.compare import Prediction, first_difference
from launch.data.prompts import load_builtin
from lp.models.loader import Loaded, load
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from scripts.studies.parts.soak import resident_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("LP_REAL_MODEL"), reason="needs a real model: bash scripts/real_model.sh"),
]
ROOT = Path(__file__).resolve().parents[2]
GROUPS = 25
TOGETHER = 8  # texts of a group: 200 in all
NEW = 256
CHATS = 6
TURNS = 3
SCHEMAS = 12
MEMORY_TEXTS = 40
MEMORY_NEW = 500
WARM_UP = 10  # texts behind which memory is to stay as it is
GROWTH = 0.02
QUESTIONS = [
    "What is a hash map?",
    "Write a Python function that reverses a list.",
    "Give an example.",
    "Explain that to a child.",
    "What is the capital of France, and what is it known for?",
    "And of Italy?",
    "List five fruits.",
    "Why is the sky blue?",
]


@cache
def loaded() -> Loaded:
    return load(os.environ["LP_REAL_MODEL"], dtype=torch.float32)


@cache
def sources() -> tuple[list[int], ...]:
    """Code and prose of this project, in tokens."""
    paths = [*sorted((ROOT / "lp").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [path.read_text(encoding="utf-8")[:20_000] for path in paths]
    return tuple(ids for text in texts if len(ids := list(loaded().tokenizer(text).input_ids)) > 400)


def drawn_config(rng: random.Random) -> lp.LookaheadConfig:
    """Steps of up to some 40 tokens."""
    return lp.LookaheadConfig(
        window_size=rng.randint(1, 7), ngram_size=rng.randint(2, 4), guess_set_size=rng.randint(1, 7)
    )


def explained(prefix: list[int], found: list[int], expected: list[int], sampling: lp.SamplingParams | None) -> str:
    """What is wrong with a text; empty where it is the expected one, or parts from it at a tie within rounding."""
    at = first_difference(found, expected)
    if at is None:
        return ""
    if at >= min(len(found), len(expected)):
        return f"{len(found)} tokens instead of {len(expected)}"
    prediction = Prediction.after(loaded().model, [*prefix, *expected[:at]], sampling)
    print(f"parts at token {at}: gap {prediction.gap():.1e}, near tie {prediction.near_tie:.1e}")
    if prediction.may_be(found[at], expected[at]):
        return ""
    return f"token {at} is {found[at]} instead of {expected[at]}, of scores {prediction.gap()} apart"


def check(
    prompts: Sequence[list[int]],
    found: Sequence[list[int]],
    expected: Sequence[list[int]],
    samplings: Sequence[lp.SamplingParams | None],
) -> int:
    """Every text is explained; returns how many are not the expected ones to the last token."""
    cases = [*zip(prompts, found, expected, samplings, strict=True)]
    wrong = [why for case in cases if (why := explained(*case))]
    assert not wrong, wrong
    return sum(one != other for _, one, other, _ in cases)


@pytest.mark.parametrize("number", range(GROUPS))
def test_texts_are_those_of_generate(number: int) -> None:
    """On one to three ranks, alone and together; prompts of one length, as `generate` pads the others."""
    rng = random.Random(f"texts-{number}")
    model = loaded().model
    length = rng.choice([16, 60, 150, 300])
    prompts = []
    for ids in rng.sample(sources(), TOGETHER):
        start = rng.randrange(len(ids) - length)
        prompts.append(ids[start : start + length])
    batch = torch.tensor(prompts)
    given = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    whole = model.generate(batch, attention_mask=torch.ones_like(batch), pad_token_id=0, **given)  # type: ignore[operator]
    expected = whole[:, length:].tolist()
    config, places = drawn_config(rng), rng.choice([1, 3, 8])
    forbidden = tf.SuppressTokensLogitsProcessor([loaded().tokenizer.eos_token_id])  # as `min_new_tokens` does

    def body(context: ParallelContext) -> list[list[int]]:
        decoder = lp.LookaheadDecoder(model, config, context)
        with lp.Engine(decoder, places) as engine:
            handles = [engine.submit(prompt, NEW, eos_token_id=(), logits_processor=[forbidden]) for prompt in prompts]
            engine.run()
            return [handle.result().tokens for handle in handles]

    ranks = rng.choice([1, 1, 2, 3])
    found = run_lockstep(ranks, body)
    assert all(each == found[0] for each in found)
    parted = check(prompts, found[0], expected, [None] * TOGETHER)
    print(f"group {number}: {TOGETHER} texts of {NEW} tokens, {ranks} ranks, {places} places: {parted} part at a tie")
    assert parted <= 1


@pytest.mark.parametrize("number", range(CHATS))
def test_chats_are_plain_decodings(number: int) -> None:
    """Turns whose prefix is reused, greedy and sampled, to the model's own end of a turn, on one and three ranks."""
    rng = random.Random(f"chats-{number}")
    model, tokenizer = loaded().model, loaded().tokenizer
    sampling = lp.SamplingParams(temperature=0.8, seed=number) if number % 2 else None
    config, questions = drawn_config(rng), rng.sample(QUESTIONS, TURNS)

    def chat(decoder: lp.Decoder) -> list[tuple[list[int], list[int]]]:
        messages, turns = [], []
        for question in questions:
            messages.append({"role": "user", "content": question})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            tokens = decoder.generate(ids, 120, sampling).tokens
            turns.append((list(ids), tokens))
            messages.append({"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)})
        return turns

    expected = chat(lp.PlainDecoder(model))
    for ranks in (1, 3):
        found = run_lockstep(ranks, lambda context: chat(lp.LookaheadDecoder(model, config, context)))
        assert all(each == found[0] for each in found)
        for (prompt, tokens), (own_prompt, own_tokens) in zip(found[0], expected, strict=True):
            if prompt != own_prompt:
                break  # it parted at a tie in the turn before
            assert not explained(prompt, tokens, own_tokens, sampling)


def test_json_is_plain_decodings() -> None:
    """Under grammars of drawn schemas, alone and together."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    rng = random.Random("json")
    model, tokenizer = loaded().model, loaded().tokenizer
    compiler = lp.GrammarCompiler(tokenizer, model.config.vocab_size)
    kinds = [
        {"type": "string", "maxLength": 20},
        {"type": "integer"},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        {"enum": ["red", "green", None]},
    ]
    prompts, schemas = [], []
    for _ in range(SCHEMAS):
        names = rng.sample(["name", "age", "colour", "sizes", "open"], rng.randint(1, 4))
        fields = {name: rng.choice(kinds) for name in names}
        schemas.append({"type": "object", "properties": fields, "required": names, "additionalProperties": False})
        messages = [{"role": "user", "content": f"Make up a record with {', '.join(names)}, as JSON."}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        prompts.append(list(ids))
    samplings = [lp.SamplingParams(temperature=0.8, seed=at) if at % 2 else None for at in range(SCHEMAS)]
    plain = lp.PlainDecoder(model)
    expected = [
        plain.generate(ids, 80, sampling, grammar=compiler.json_schema(schema)).tokens
        for ids, sampling, schema in zip(prompts, samplings, schemas, strict=True)
    ]
    for places in (1, 4):
        with lp.Engine(lp.LookaheadDecoder(model, drawn_config(rng)), places) as engine:
            handles = [
                engine.submit(ids, 80, sampling, grammar=compiler.json_schema(schema))
                for ids, sampling, schema in zip(prompts, samplings, schemas, strict=True)
            ]
            engine.run()
            found = [handle.result().tokens for handle in handles]
        assert found == expected, places


def test_infill_by_prompt_is_plain_decodings() -> None:
    """A model that has no tokens for the middle of a file is asked for it in words."""
    model, tokenizer = loaded().model, loaded().tokenizer
    plain = lp.PlainDecoder(model)
    decoder = lp.LookaheadDecoder(model)
    for prompt, sampling in itertools.product(load_builtin(6), (None, lp.SamplingParams(temperature=0.4, seed=3))):
        cut = len(prompt.text) // 2
        asked = f"Give the code that is missing at <HERE>:\n\n{prompt.text[:cut]}<HERE>{prompt.text[cut:]}"
        messages = [{"role": "user", "content": asked}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        found, expected = (each.generate(ids, 100, sampling).tokens for each in (decoder, plain))
        assert not explained(list(ids), found, expected, sampling)


def test_memory_stays_over_20000_tokens() -> None:
    rng = random.Random("memory")
    model = loaded().model
    sizes: list[int] = []
    tokens = 0
    with lp.Engine(lp.LookaheadDecoder(model), 4, cache_tokens=4096) as engine:
        for first in range(0, MEMORY_TEXTS, 4):
            handles = []
            for number in range(first, first + 4):
                ids = rng.choice(sources())[: rng.randint(20, 400)]
                sampling = lp.SamplingParams(temperature=0.8, seed=number)
                handles.append(engine.submit(ids, MEMORY_NEW, sampling, eos_token_id=()))
            engine.run()
            tokens += sum(len(handle.result().tokens) for handle in handles)
            gc.collect()
            size = resident_bytes()
            if size is None:
                pytest.skip("the system does not report resident memory")
            sizes.append(size)
            print(f"{tokens} tokens: {size / 2**20:.0f} MiB")
    assert tokens == MEMORY_TEXTS * MEMORY_NEW == 20_000
    # A prompt's logits, up to 80 MB, go back to the system now and then; what is lost raises the least of some sizes.
    settled, middle = WARM_UP // 4, len(sizes) // 2
    assert min(sizes[middle:]) <= min(sizes[settled:middle]) * (1 + GROWTH), sizes
