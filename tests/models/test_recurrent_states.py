"""What recurrent states hold: those of a fresh prefill of the same text, after thousands of steps and on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import lp
from lp.draft.layout import ancestors
from lp.engine.generation import Generation
from lp.models.hybrid_cache import HybridCache
from lp.models.runner import ModelRunner
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.conftest import LONG
from tests.support.switches import lookahead_config
from tests.support.tiny_models import MATRIX, VOCABULARY, drawn_text, tiny_model

ARCHS = ["qwen3_5", "mamba2", "lfm2"]  # a delta rule, a state space, a convolution alone
pytestmark = pytest.mark.skipif(not set(ARCHS) <= set(MATRIX), reason="this release of transformers lacks some")
STEPS = [100, 1_000, 10_000] if LONG else [30, 300]
# Of the largest number of a state, in float32: what rounding comes to in a prefill as well, whatever the length.
DRIFT = 2e-5


def difference(cache: HybridCache, fresh: HybridCache) -> float:
    """The largest, by the largest number of the same layer's state."""
    return max(
        float((mine - theirs).abs().max() / theirs.abs().max())
        for index, layer in cache.recurrent.layers.items()
        for mine, theirs in [
            (layer.last_CK, fresh.recurrent.layers[index].last_CK),
            (layer.state_HRD, fresh.recurrent.layers[index].state_HRD),
        ]
        if theirs.numel()
    )


def prefilled(runner: ModelRunner, text: list[int], capacity: int) -> HybridCache:
    cache = runner.new_cache(capacity)
    assert isinstance(cache, HybridCache)
    runner.prefill(text, cache, 512)
    return cache


def step_with_tree(runner: ModelRunner, cache: HybridCache, text: list[int], rng: random.Random) -> list[int]:
    """A step of a drawn tree; the path to one of its nodes is committed. Returns the path's tokens."""
    count = rng.randint(1, 8)
    parents = [-1, *(rng.randrange(at) for at in range(1, count))]
    visible = ancestors(parents)
    tokens = [rng.randrange(VOCABULARY) for _ in range(count)]
    positions = [len(text) + int(row.sum()) - 1 for row in visible]
    runner.forward(tokens, positions, visible, cache, [0], capture=False)
    end = rng.randrange(count)
    path = [node for node in range(count) if visible[end][node]]
    cache.commit(path)
    return [tokens[node] for node in path]


def test_the_tree_of_a_step_is_on_every_device() -> None:
    """Layers lie on several devices; each takes the tree from its own, where it is copied once."""
    runner = ModelRunner(tiny_model("qwen3_5"))
    cache = prefilled(runner, [1, 2, 3], 20)
    cache.recurrent.begin_tree(torch.tensor(ancestors([-1, 0, 0, 2])))
    here, there = (cache.recurrent.tree_on(torch.device(name)) for name in ("cpu", "meta"))
    assert here is cache.recurrent.tree and here is not None
    assert {there.visible_TT.device.type, there.roots_T.device.type, there.earlier_TK.device.type} == {"meta"}
    assert cache.recurrent.tree_on(torch.device("meta")) is there
    cache.recurrent.begin_tree(torch.tensor(ancestors([-1, 0])))
    assert len(cache.recurrent.tree_on(torch.device("meta")).roots_T) == 2, "the step's own"


@pytest.mark.parametrize("arch", ARCHS)
def test_states_do_not_drift(arch: str) -> None:
    """A rounding error that every commit adds to would grow with the text."""
    rng = random.Random(arch)
    model = tiny_model(arch, dtype=torch.float32, max_position_embeddings=1 << 16)
    runner = ModelRunner(model, capture=lp.Capture.OFF)
    capacity = 9 * STEPS[-1] + 16
    text = drawn_text(rng, 20)
    with torch.inference_mode():
        cache = prefilled(runner, text, capacity)
        for step in range(1, STEPS[-1] + 1):
            text += step_with_tree(runner, cache, text, rng)
            if step in STEPS:
                fresh = prefilled(runner, text, capacity)
                assert difference(cache, fresh) < DRIFT, f"after {step} steps, {len(text)} tokens"


@pytest.mark.parametrize("kv_sync", ["recompute", "broadcast"])
def test_every_rank_holds_the_states_of_the_text(
    kv_sync: str, monkeypatch: pytest.MonkeyPatch, cases: Callable[[int, int], range]
) -> None:
    """A state that lacks a token, or has one twice, shows in no text before it is far off."""
    steps: list[int] = []
    end_step = Generation.end_step

    def looking(self: Any, *args: Any) -> Any:
        reason = end_step(self, *args)
        held = self.text[: len(self.text) - 1 - len(self.catch_up)]
        assert self.cache.length == len(held)
        fresh = prefilled(self.runner, held, len(held) + 8)
        assert difference(self.cache, fresh) < 1e-4
        steps.append(len(self.catch_up))
        return reason

    monkeypatch.setattr(Generation, "end_step", looking)
    for case in cases(3, 30):
        rng = random.Random(f"{kv_sync}-{case}")
        ranks = 2 + case % 3
        models = [tiny_model(ARCHS[case % 3], seed=case) for _ in range(ranks)]
        config = lookahead_config(
            window_size=rng.randint(0, 8), ngram_size=rng.randint(2, 5), guess_set_size=8, kv_sync=kv_sync
        )
        run_lockstep(ranks, partial(_generate, models, config, drawn_text(rng, rng.randint(1, 50))))
    assert any(steps) == (kv_sync == "recompute"), "no rank lacked a token: the test saw nothing"


def _generate(
    models: list[Any], config: lp.LookaheadConfig, ids: list[int], context: ParallelContext
) -> lp.GenerationOutput:
    return lp.LookaheadDecoder(models[context.rank], config, context).generate(ids, 25)


def test_a_chain_goes_on_from_a_state_of_steps() -> None:
    """A prefill behind committed steps begins with their state, not anew."""
    rng = random.Random(0)
    for arch in ARCHS:
        runner = ModelRunner(tiny_model(arch), capture=lp.Capture.OFF)
        with torch.inference_mode():
            cache = prefilled(runner, [], 200)
            text = step_with_tree(runner, cache, [], rng) + step_with_tree(runner, cache, [1] * cache.length, rng)
            more = drawn_text(rng, 7)
            positions, visible = range(len(text), len(text) + 7), np.tri(7, dtype=bool)
            runner.forward(more, positions, visible, cache, (0,), capture=False, chain=True)
            cache.commit(range(7))
            assert difference(cache, prefilled(runner, text + more, 200)) < 1e-5, arch
