"""Sampled text has the model's distribution: every sampler, with and without processors; and draws are independent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as tf

import lp
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from lp.sampling.noise import gumbel
from tests.support.chi_square import joint, lumped, p_of_texts, p_value
from tests.support.tiny_models import tiny_model

LONG = bool(os.environ.get("LP_TEST_LONG"))
DRAWS = 6000 if LONG else 160  # texts of a case
PAIRS = 200_000 if LONG else 4_000  # pairs of draws
LEVEL = 0.001
VOCABULARY, TOKENS = 4, 3
PROMPT = [1, 2, 3, 1, 2, 0, 1]
CONFIG = lp.LookaheadConfig(window_size=2, ngram_size=3, guess_set_size=1)
CPU = torch.device("cpu")
COUPLED, REJECTION = lp.Verifier.COUPLED, lp.Verifier.REJECTION
WARPERS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "penalty": {"repetition_penalty": 2.0},
    "all": {"temperature": 0.9, "top_k": 3, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.3},
}
SHORT = [(COUPLED, 1, "none"), (COUPLED, 2, "all"), (REJECTION, 1, "min-p"), (REJECTION, 2, "all")]
ALL = [(verifier, ranks, warpers) for verifier in (COUPLED, REJECTION) for ranks in (1, 2) for warpers in WARPERS]


def _model() -> tf.PreTrainedModel:
    return tiny_model(vocab_size=VOCABULARY, sharpness=1.0, seed=1, num_hidden_layers=1)


def _texts(
    model: tf.PreTrainedModel,
    verifier: lp.Verifier,
    ranks: int,
    warpers: dict[str, Any],
    processors: Sequence[Any] = (),
) -> list[list[int]]:
    """A text by seed, alike on all ranks; drafts of some steps were accepted, of others turned down."""

    def body(context: ParallelContext) -> tuple[list[list[int]], int]:
        decoder = lp.LookaheadDecoder(model, CONFIG, context)
        texts, steps = [], 0
        for seed in range(DRAWS):
            params = lp.SamplingParams(seed=seed, verifier=verifier, **warpers)
            output = decoder.generate(PROMPT, TOKENS, params, logits_processor=[*processors], eos_token_id=())
            texts.append(output.tokens)
            steps += output.steps
        return texts, steps

    (texts, steps), *others = run_lockstep(ranks, body)
    assert all(other == texts for other, _ in others)
    assert DRAWS < steps < TOKENS * DRAWS
    return texts


def _p(model: tf.PreTrainedModel, texts: Sequence[Sequence[int]], warpers: dict[str, Any]) -> float:
    exact = joint(model, PROMPT, TOKENS, lp.SamplingParams(**warpers).processors())
    return p_of_texts(texts, exact, VOCABULARY)


@pytest.mark.parametrize(("verifier", "ranks", "warpers"), ALL if LONG else SHORT)
def test_texts_have_the_models_probabilities(verifier: lp.Verifier, ranks: int, warpers: str) -> None:
    """A sampler, a walk or a processor of a branch that favours drafted tokens."""
    model = _model()
    assert _p(model, _texts(model, verifier, ranks, WARPERS[warpers]), WARPERS[warpers]) > LEVEL


class _Favours(tf.LogitsProcessor):
    """Odds of token 0, times a factor: a planted bias."""

    per_branch = True

    def __init__(self, factor: float) -> None:
        self.logit = torch.tensor(factor).log()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.logit * (torch.arange(scores.shape[-1]) == 0)


@pytest.mark.parametrize("verifier", [COUPLED, REJECTION])
def test_a_bias_of_the_stated_size_is_seen(verifier: lp.Verifier) -> None:
    """The test above must be able to tell: docs/experiments/reliability.md states which bias it sees."""
    model = _model()
    factor = 1.25 if LONG else 2.5
    assert _p(model, _texts(model, verifier, 1, {}, [_Favours(factor)]), {}) < LEVEL


def _independent_p(first: torch.Tensor, second: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p of pairs of tokens against the product of their probabilities."""
    size = len(probabilities)
    counts = torch.bincount(first * size + second, minlength=size**2).double()
    expected = (probabilities[:, None] * probabilities).flatten() * len(first)
    return p_value(lumped(counts, expected), lumped(expected, expected))


LOGITS = torch.tensor([1.0, 0.2, -0.5, 1.4, 0.0, -1.0], dtype=torch.float64)


def _draws(seeds: Sequence[int], sequences: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """What each of these samples from LOGITS."""
    noise = [gumbel(*at, len(LOGITS), CPU) for at in zip(seeds, sequences, positions, strict=True)]
    return (LOGITS + torch.stack(noise)).argmax(-1)


@pytest.mark.parametrize("field", ["seed", "sequence", "position"])
@pytest.mark.parametrize("distance", [1, 2, 64] if LONG else [1])
def test_draws_that_differ_in_one_thing_are_independent(field: str, distance: int) -> None:
    """Noise that neighbouring positions, seeds or sequences of a batch share would make texts repeat each other."""
    ones, run, moved = [3] * PAIRS, range(PAIRS), range(distance, PAIRS + distance)
    at = {name: ones for name in ("seed", "sequence", "position")}
    first = _draws(*(at | {field: run}).values())
    second = _draws(*(at | {field: moved}).values())
    assert _independent_p(first, second, LOGITS.softmax(-1)) > LEVEL


def test_draws_that_hang_together_are_seen() -> None:
    """The test above can tell: one second draw in eight is the first one."""
    at = range(PAIRS)
    first, second = (_draws([3] * PAIRS, [sequence] * PAIRS, at) for sequence in (0, 1))
    copied = torch.where(torch.arange(PAIRS) % 8 == 0, first, second)
    assert _independent_p(first, copied, LOGITS.softmax(-1)) < LEVEL


@pytest.mark.parametrize("verifier", [COUPLED, REJECTION])
def test_texts_of_a_batch_are_independent(verifier: lp.Verifier) -> None:
    """Two texts of one prompt and one seed, in one batch, are two draws: each, and both together."""
    model = _model()
    decoder = lp.LookaheadDecoder(model, CONFIG)
    pairs = []
    for seed in range(DRAWS):
        params = lp.SamplingParams(seed=seed, verifier=verifier)
        outputs = decoder.generate_batch([PROMPT, PROMPT], 2, params, eos_token_id=())
        pairs.append([token for output in outputs for token in output.tokens])
    one = joint(model, PROMPT, 2, [])
    assert p_of_texts(pairs, (one[:, None] * one).flatten(), VOCABULARY) > LEVEL
