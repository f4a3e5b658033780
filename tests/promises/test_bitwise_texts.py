"""exact="bitwise" over drawn texts: alone and beside others, on one rank and several, behind reused prefixes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lp
from lp.models.loader import DEMO_MODEL, load
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.conftest import LONG
from tests.support.pools import drawn_step_times
from tests.support.tiny_models import drawn_text, tiny_model

MODELS = ("demo", "qwen3", "gemma3", "mixtral")
REAL = "real"  # the model in the folder that LP_REAL_MODEL names
DTYPES = (torch.float32, torch.bfloat16)
# Texts of each model and dtype, at least.
TEXTS = 64 if LONG else 4
NEW = 128 if LONG else 16
MOST_TOGETHER = 8 if LONG else 3
REAL_TEXTS = 40  # half of them sampled, about
REAL_NEW = 64


@cache
def model_of(name: str, dtype: torch.dtype) -> PreTrainedModel:
    if name == REAL:
        return load(os.environ["LP_REAL_MODEL"], dtype=dtype).model
    return load(DEMO_MODEL, dtype=dtype).model if name == "demo" else tiny_model(name, dtype=dtype, sharpness=2.0)


Pair = tuple[lp.GenerationOutput, lp.GenerationOutput]


@cache
def source_ids() -> list[int]:
    """This file in the real model's tokens."""
    return list(load(os.environ["LP_REAL_MODEL"]).tokenizer(Path(__file__).read_text(encoding="utf-8")).input_ids)


def part_of_source(rng: random.Random, num_tokens: int, vocabulary: int) -> list[int]:
    """A drawn part of this file, as `drawn_text` draws tokens: a trained model is asked about text of its own kind."""
    ids = source_ids()
    assert max(ids) < vocabulary
    start = rng.randrange(len(ids) - num_tokens)
    return ids[start : start + num_tokens]


def texts_of(
    model: PreTrainedModel, seed: str, exact: str, num_new: int = NEW, draw: Callable[..., list[int]] = drawn_text
) -> Iterator[Pair]:
    """A drawn mix of texts in two turns, each by an engine of lookahead in this mode and by plain decoding alone.

    The second turn's prompts hold what the first turn gave, so that its prefix is reused.
    """
    rng = random.Random(seed)
    plain = lp.PlainDecoder(model, exact="bitwise")
    vocabulary = model.config.get_text_config().vocab_size
    config = lp.LookaheadConfig(
        window_size=rng.randint(0, 12),
        ngram_size=rng.randint(2, 6),
        guess_set_size=rng.randint(0, 12),
        adaptive=rng.random() < 0.4,
    )
    ranks = rng.choice([1, 1, 2, 3])
    prompts = [draw(rng, rng.choice([1, 20, 100, 300]), vocabulary) for _ in range(rng.randint(1, MOST_TOGETHER))]
    samplings = [lp.SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(99)) for _ in prompts]
    behind = [draw(rng, rng.randint(1, 9), vocabulary) for _ in prompts]
    places = rng.randint(1, len(prompts))
    asked: dict[str, Any] = {"eos_token_id": (), "output_logits": ranks == 1}

    def body(context: ParallelContext) -> list[lp.GenerationOutput]:
        times = drawn_step_times(random.Random(seed)) if config.adaptive else None
        decoder = lp.LookaheadDecoder(model, config, context, step_times=times, exact=exact)
        outputs: list[lp.GenerationOutput] = []
        ids = prompts
        with lp.Engine(decoder, places) as engine:
            for _ in range(2):
                pairs = zip(ids, samplings, strict=True)
                handles = [engine.submit(prompt, num_new, sampling, **asked) for prompt, sampling in pairs]
                engine.run()
                turn = [handle.result() for handle in handles]
                ids = [[*a, *output.tokens, *b] for a, output, b in zip(ids, turn, behind, strict=True)]
                outputs += turn
        return outputs

    found = run_lockstep(ranks, body)
    expected: list[lp.GenerationOutput] = []
    ids = prompts
    for _ in range(2):
        pairs = zip(ids, samplings, strict=True)
        turn = [plain.generate(prompt, num_new, sampling, **asked) for prompt, sampling in pairs]
        ids = [[*a, *output.tokens, *b] for a, output, b in zip(ids, turn, behind, strict=True)]
        expected += turn
    for outputs in found:
        assert ranks == 1 or [output.tokens for output in outputs] == [output.tokens for output in found[0]]
    yield from zip(found[0], expected, strict=True)


def same(found: lp.GenerationOutput, expected: lp.GenerationOutput) -> bool:
    """Tokens, and on one rank the logits of every token."""
    if found.tokens != expected.tokens:
        return False
    if found.logits is None or expected.logits is None:
        return found.logits is expected.logits
    return torch.equal(found.logits, expected.logits)


def compare(name: str, dtype: torch.dtype, num_texts: int, num_new: int, draw: Callable[..., list[int]]) -> None:
    """Draw mixes until there are so many texts, and compare each."""
    model, compared, reused, number = model_of(name, dtype), 0, 0, 0
    while compared < num_texts:
        for found, expected in texts_of(model, f"{name}-{dtype}-{number}", "bitwise", num_new, draw):
            assert same(found, expected), f"text {compared} of mix {number}"
            compared += 1
            reused += found.reused > 0
        number += 1
        print(f"{name}, {dtype}: {compared} texts of {num_new} tokens, {reused} behind a reused prefix, {number} mixes")


@pytest.mark.subset(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_texts_are_plain_decodings(name: str, dtype: torch.dtype) -> None:
    """A text that another one, a rank, a budget or a prefix changes by one bit is another text sooner or later."""
    compare(name, dtype, TEXTS, NEW, drawn_text)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("LP_REAL_MODEL"), reason="LP_REAL_MODEL names no folder of a real model")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_texts_of_the_real_model_are_plain_decodings(dtype: torch.dtype) -> None:
    """A trained model amplifies a difference that the tiny ones forget."""
    compare(REAL, dtype, REAL_TEXTS, REAL_NEW, part_of_source)


def test_the_usual_mode_does_not_give_them() -> None:
    """What never differs shows nothing."""
    model = model_of("gemma3", torch.bfloat16)
    assert any(not same(*pair) for number in range(20) for pair in texts_of(model, str(number), "tokens"))
