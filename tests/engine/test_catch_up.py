"""What ranks know of each other's caches and what lies in them: neither shows in a text before it is far off."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import lp
from lp.attention.flash import SHORT
from lp.engine.generation import Generation
from lp.models.releases import cache_keyword
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.pools import drawn_step_times, drawn_switches
from tests.support.switches import lookahead_config
from tests.support.tiny_models import BOUNDARY, drawn_text, tiny_model

ARCHS = ["llama", "llama", "gemma3", "mistral_sliding", "phi3_longrope"]


@pytest.fixture
def at_every_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Have a look at each rank's generation behind every step."""

    def arrange(look: Callable[[Any], None]) -> None:
        end_step = Generation.end_step

        def looking(self: Any, *args: Any) -> Any:
            reason = end_step(self, *args)
            look(self)
            return reason

        monkeypatch.setattr(Generation, "end_step", looking)

    return arrange


def _run(case: int, kv_sync: lp.KVSync | None = None) -> tuple[int, str]:
    """Generate a drawn text on 1 to 6 ranks; each third one has about as many tokens as make attention other code."""
    rng, ranks, long = random.Random(f"catch-up-{case}"), 1 + case % 6, case % 3 == 1
    arch = "llama" if long else rng.choice(ARCHS)
    models = [tiny_model(arch, seed=case, max_position_embeddings=4 * SHORT) for _ in range(ranks)]
    length = SHORT + rng.randint(-20, 200) if long else rng.randint(1, 60)
    ids = drawn_text(rng, BOUNDARY - 8 if "longrope" in arch else length)
    config = lookahead_config(
        window_size=rng.randint(0, 10),
        ngram_size=rng.randint(2, 5),
        guess_set_size=rng.randint(1, 10),
        kv_sync=kv_sync or rng.choice(list(lp.KVSync)),
        **drawn_switches(rng),
    )
    step_times = drawn_step_times(rng)

    def body(context: ParallelContext) -> None:
        lp.LookaheadDecoder(models[context.rank], config, context, step_times=step_times).generate(ids, 40)

    run_lockstep(ranks, body)
    return ranks, f"case {case}, {ranks} ranks of {arch}: {config}"


def test_ranks_know_what_each_of_them_lacks(at_every_step: Any, cases: Callable[[int, int], range]) -> None:
    """A wrong count gives the same text from a worse balance; a rank that counts otherwise than the rest, another."""
    seen: dict[tuple[int, int], tuple[list[int], int]] = {}

    def look(generation: Any) -> None:
        lacks = len(generation.catch_up)
        assert generation.cache.length + lacks == len(generation.text) - 1
        seen[len(generation.stats), generation.context.rank] = [*generation.catch_up_counts], lacks

    at_every_step(look)
    kinds = set[int]()
    for case in cases(16, 120):
        seen.clear()
        ranks, where = _run(case)
        for step in range(1, max(step for step, _ in seen) + 1):
            lacking = [seen[step, rank][1] for rank in range(ranks)]
            counted = [seen[step, rank][0] for rank in range(ranks)]
            assert counted == [lacking] * ranks, f"step {step} of {where}"
            kinds |= {*lacking} if len({*lacking}) > 1 else set()
    assert len(kinds) >= 4, "ranks that all lack as many show nothing"


@pytest.mark.parametrize("kv_sync", list(lp.KVSync))
def test_the_cache_is_that_of_the_text(
    at_every_step: Any, kv_sync: lp.KVSync, cases: Callable[[int, int], range]
) -> None:
    """Rows of the right tokens in a wrong order give the same text, but for a sliding window."""
    looks: list[int] = []

    def look(generation: Any) -> None:
        cache, truth = generation.cache, DynamicCache()  # of every row, also those behind a window
        model = generation.runner.model
        model(torch.tensor([generation.text[: cache.length]]), use_cache=True, **{cache_keyword(model): truth})
        for mine, plain in zip(cache.layers, truth.layers, strict=True):
            torch.testing.assert_close(mine.keys[:, :, : cache.length], plain.keys, rtol=0, atol=1e-6)
            torch.testing.assert_close(mine.values[:, :, : cache.length], plain.values, rtol=0, atol=1e-6)
        looks.append(cache.length)

    at_every_step(look)
    for case in cases(4, 60):
        _run(case, kv_sync)
    assert len(looks) > 100
