"""A predicted text: it changes no token, and most of it comes in a few steps."""

from __future__ import annotations

import random

import pytest
from transformers import PreTrainedModel

import lp
from lp.errors import UserError
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.serving import STEP_TIMES
from tests.support.tiny_models import plain_greedy

PROMPT = [5, 9, 3, 7, 5, 9]
SAMPLED = lp.SamplingParams(temperature=0.8, seed=7)
CONFIGS = [lp.LookaheadConfig(), lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=20)]
CONFIGS += [lp.PromptLookupConfig(num_tokens=20)]  # which has no share of its own


def edited(tokens: list[int], seed: int) -> list[int]:
    """A text's tokens with a few left out, changed and added, as a user's prediction differs from the text."""
    draws, tokens = random.Random(seed), list(tokens)
    for _ in range(3):
        at = draws.randrange(len(tokens))
        tokens[at : at + draws.randrange(4)] = [draws.randrange(50) for _ in range(draws.randrange(4))]
    return tokens


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_it_changes_no_token(model: PreTrainedModel, config: object, sampling: lp.SamplingParams | None) -> None:
    """Right, edited or wrong; and the right one takes a third of the steps at most, an edited one no more than none."""
    decoder = lp.LookaheadDecoder(model, config, step_times=STEP_TIMES)
    without = decoder.generate(PROMPT, 120, sampling, eos_token_id=())
    right = decoder.generate(PROMPT, 120, sampling, eos_token_id=(), prediction=without.tokens)
    assert right.tokens == without.tokens
    assert right.compression >= (3 * without.compression if sampling else 10)
    assert right.accepted_prediction >= 100 and without.accepted_prediction == 0
    for seed in range(3):
        changed = decoder.generate(PROMPT, 120, sampling, eos_token_id=(), prediction=edited(without.tokens, seed))
        assert changed.tokens == without.tokens
        assert 50 < changed.accepted_prediction <= 120 and changed.compression > 1.5
    wrong = decoder.generate(PROMPT, 120, sampling, eos_token_id=(), prediction=[11] * 200)
    assert wrong.tokens == without.tokens


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2]])
def test_ranks_have_it_alike(model: PreTrainedModel, config: object) -> None:
    """The tokens of plain decoding on two ranks, by as few steps as on one."""
    expected = plain_greedy(model, PROMPT, 80)

    def body(context: ParallelContext) -> lp.GenerationOutput:
        decoder = lp.LookaheadDecoder(model, config, context, step_times=STEP_TIMES)
        return decoder.generate(PROMPT, 80, eos_token_id=(), prediction=expected)

    for output in run_lockstep(2, body):
        assert output.tokens == expected and output.compression > 8


def test_texts_of_an_engine_have_their_own(model: PreTrainedModel) -> None:
    decoder = lp.LookaheadDecoder(model, step_times=STEP_TIMES)
    alone = [decoder.generate(PROMPT, 60, lp.SamplingParams(seed=seed), eos_token_id=()).tokens for seed in range(2)]
    engine = lp.Engine(decoder, cache_tokens=2048)
    handles = [
        engine.submit(PROMPT, 60, lp.SamplingParams(seed=seed), eos_token_id=(), prediction=alone[seed])
        for seed in range(2)
    ]
    engine.run()
    for handle, tokens in zip(handles, alone, strict=True):
        assert handle.result().tokens == tokens and handle.result().accepted_prediction >= 40


def test_bad_predictions(model: PreTrainedModel) -> None:
    decoder = lp.LookaheadDecoder(model, step_times=STEP_TIMES)
    with pytest.raises(UserError, match="prediction is 100000; it must be an integer in"):
        decoder.generate(PROMPT, 4, prediction=[1, 100000])
    assert lp.AutoregressiveDecoder(model).generate(PROMPT, 4, prediction=[1]).accepted_prediction == 0
