"""Learning a part of a step at once and the rest while the device computes: proposals must not be the worse for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import lp
from lp.budget.step_times import StepTimes
from lp.draft.pool.mixture import FEATURES
from lp.draft.pool.ngram_pool import NGramPool
from lp.draft.source import StepSamples
from lp.draft.tree import DraftTree
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from lp.sampling.top_logits import INVALID_TOKEN
from tests.support.pools import drawn_step, drawn_switches, empty_tables, pool_of
from tests.support.tiny_models import drawn_text, tiny_model


def observed_at_once(pool: NGramPool, text: list[int], num_new: int, samples: StepSamples, budget: int) -> DraftTree:
    """The next proposal of a pool that learns a whole step before it proposes."""
    pool.observe(text, num_new, samples)
    return pool.propose(text, budget)


def observed_late(pool: NGramPool, text: list[int], num_new: int, samples: StepSamples, budget: int) -> DraftTree:
    """The next proposal of a pool that merges a step's samples behind it; their memory is overwritten afterwards."""
    packed = samples.packed.copy()
    merge = pool.observe_part(text, num_new, replace(samples, packed=packed))
    tree = pool.propose(text, budget)
    merge()
    packed[:] = -1
    return tree


@pytest.mark.parametrize("kinds", [5, 40])
def test_late_merging_changes_no_proposal(kinds: int, cases: Callable[[int, int], range]) -> None:
    """While its buckets have room, the pool proposes what it would have, though most of a step is not in it yet."""
    grown = 0
    for seed in cases(60, 600):
        rng = random.Random(f"{seed} {kinds}")
        text = [rng.randrange(kinds) for _ in range(rng.randint(1, 30))]
        config = drawn_switches(rng) | {"num_logits": min(rng.choice([0, 4, 16]), kinds), "pool_mib": 16}
        noise = (seed, 1) if rng.random() < 0.5 else None
        weights = np.array([rng.gauss(0, 1.5) for _ in range(FEATURES)])
        made = pool_of([1], **config).config
        at_once, late = (pool_of(text, noise, empty_tables(made, weights), **config) for _ in range(2))
        for step in range(12):
            new, samples = drawn_step(rng, text, kinds, at_once.num_logits)
            if rng.random() < 0.3:  # scores that are NaN
                sampled = [token if rng.random() < 0.8 else INVALID_TOKEN for token in samples.sampled]
                samples = replace(samples, sampled=np.array(sampled))
            text = text + new
            budget = rng.randint(1, 30)
            expected = observed_at_once(at_once, text, len(new), samples, budget)
            assert observed_late(late, text, len(new), samples, budget) == expected, f"seed {seed}, step {step}"
            grown += len(expected)
        remembered = [np.sort(np.asarray(pool._tables.logits_keys)) for pool in (at_once, late)]
        assert (remembered[0] == remembered[1]).all(), f"seed {seed}: something was never merged"
    assert grown > 1000


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_text_takes_the_same_steps(ranks: int, adaptive: bool) -> None:
    """As on a GPU: samples are merged between launch and message, plain steps and the end of the text included."""
    model = tiny_model()
    config = lp.LookaheadConfig(window_size=3, ngram_size=3, guess_set_size=8, adaptive=adaptive, pool_scope="session")
    times = StepTimes((1, 8, 24), (1e-3, 1.1e-3, 4e-3), 0.9e-3) if adaptive else None
    sampling = lp.SamplingParams(temperature=0.8, seed=3)

    def texts(late: bool, context: ParallelContext) -> tuple[list[tuple[int, int, int]], list[list[int]]]:
        decoder = lp.LookaheadDecoder(model, config, context, step_times=times)
        assert decoder.merges_late is False, "the model is on the CPU"
        decoder.merges_late = late
        outputs = [decoder.generate(drawn_text(random.Random(seed), 20), 40, sampling) for seed in range(3)]
        steps = [(step.num_draft, step.accepted, step.idle) for output in outputs for step in output.step_stats]
        return steps, [output.tokens for output in outputs]

    for late, at_once in zip(
        run_lockstep(ranks, partial(texts, True)), run_lockstep(ranks, partial(texts, False)), strict=True
    ):
        assert late == at_once
        assert sum(accepted for _, accepted, _ in late[0]) > 10


def test_texts_of_an_engine_leave_a_session_their_last_step() -> None:
    """What the last step of a text had sampled was merged by `generate` alone: later texts of an engine had less."""
    model = tiny_model()
    config = lp.LookaheadConfig(window_size=3, ngram_size=3, guess_set_size=8, pool_scope="session")

    def outputs(late: bool) -> list[tuple[list[int], list[tuple[int, int]]]]:
        decoder = lp.LookaheadDecoder(model, config)
        decoder.merges_late = late
        engine = lp.Engine(decoder, reuse_prefixes=False)
        found = []
        for seed in range(6):
            handle = engine.submit(drawn_text(random.Random(seed % 3), 20), 12)
            engine.run()
            output = handle.result()
            found.append((output.tokens, [(step.num_draft, step.accepted) for step in output.step_stats]))
        return found

    assert outputs(True) == outputs(False)
