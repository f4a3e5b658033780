"""Kept caches are found by their longest common prefix with a prompt."""

from __future__ import annotations

import random
from typing import Any

import torch

import lp
from lp.engine.prefixes import Prefixes, common
from tests.support.tiny_models import drawn_text, plain_greedy, tiny_model

FIXED = lp.LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=6)


def test_the_longest_prefix_is_found() -> None:
    """A neighbour that is missed, or a text kept twice, is work or room lost."""
    rng = random.Random(3)
    given: list[Any] = []
    prefixes = Prefixes(given.append)
    kept: list[tuple[int, ...]] = []
    for _ in range(600):
        tokens = tuple(rng.choice([1, 2, 255, 256, 70000]) for _ in range(rng.randint(1, 7)))
        prompt = [rng.choice([1, 2, 255, 256, 70000]) for _ in range(rng.randint(0, 7))]
        prefixes.keep(tokens, object())  # type: ignore[arg-type]
        if not any(other[: len(tokens)] == tokens for other in kept):
            kept = [other for other in kept if tokens[: len(other)] != other] + [tokens]
        if len(kept) > 40:
            prefixes.drop_oldest()
            kept = [tuple(text.tokens.tolist()) for text in prefixes._texts.values()]
        assert {tuple(text.tokens.tolist()) for text in prefixes._texts.values()} == {*kept}
        assert prefixes.slots == sum(map(len, kept))
        found, count = prefixes.longest(prompt)
        assert count == max(len([*_alike(other, prompt)]) for other in kept)
        assert (found is None) == (count == 0)
        if found is not None:
            assert [*found.tokens[:count]] == prompt[:count]
            assert [*prefixes._texts.values()][-1] is found, "used last, dropped last"
    assert len(given) == 600 - len(prefixes)
    prefixes.clear()
    assert len(given) == 600 and not prefixes.slots and not len(prefixes)


def _alike(one: Any, other: Any) -> Any:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


def test_many_kept_texts_cost_no_more_than_few(monkeypatch: Any) -> None:
    """Short texts fill the pool by the thousand; looking at each would take longer than a step."""
    rng = random.Random(4)
    prefixes = Prefixes(lambda cache: None)
    for _ in range(3000):
        prefixes.keep([7] * 30 + [rng.randrange(1000) for _ in range(9)], object())  # type: ignore[arg-type]
    compared: list[int] = []
    monkeypatch.setattr("lp.engine.prefixes.common", lambda one, other: compared.append(1) or common(one, other))
    prefixes.longest([7] * 30 + [5] * 9)
    prefixes.keep([7] * 30 + [5] * 9, object())  # type: ignore[arg-type]
    assert len(compared) <= 2


def test_what_has_to_wait_costs_no_prefix(model: Any) -> None:
    """Kept caches go where that makes room, and not while a text waits in vain."""
    engine = lp.Engine(lp.LookaheadDecoder(model, FIXED), cache_tokens=300)
    ids = drawn_text(random.Random(1), 20)
    engine.submit(ids, 5)
    engine.run()
    blocking = engine.submit([9] * 50, 100)
    engine.step()
    waiting = engine.submit([*ids, 3], 200)
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1)
    engine.run()
    assert blocking.done
    assert waiting.reused == 20
    assert waiting.result().tokens == plain_greedy(model, [*ids, 3], 200)
    engine.pool.check()


def test_a_changed_model_reuses_nothing() -> None:
    """KV of other weights, of texts that ended or run."""
    model = tiny_model("llama", seed=1)
    engine = lp.Engine(lp.LookaheadDecoder(model, FIXED))
    ids = drawn_text(random.Random(1), 20)
    engine.submit(ids, 5)
    engine.run()
    running = engine.submit([9] * 50, 40, lp.SamplingParams(seed=1))
    while not running.tokens:
        engine.step()
    down = torch.nn.Linear(48, 32, bias=False, dtype=model.dtype)
    with torch.no_grad():
        down.weight.copy_(torch.randn(32, 48, generator=torch.Generator().manual_seed(1)))
    model.model.layers[0].mlp.down_proj = down
    handles = [engine.submit(ids, 30), engine.submit([9] * 40, 30)]
    engine.run()
    assert [handle.reused for handle in handles] == [0, 0]
    handles.append(engine.submit([9] * 60, 30))
    engine.run()
    assert handles[2].reused == 40, "of a text that ran before, nothing is kept"
    for handle, prompt in zip(handles, (ids, [9] * 40, [9] * 60), strict=True):
        assert handle.result().tokens == plain_greedy(model, prompt, 30)
