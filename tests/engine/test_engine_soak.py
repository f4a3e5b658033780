"""Many texts through one engine: no slot is lost, and nothing grows."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import torch

import lp
from tests.support.tiny_models import drawn_text, plain_greedy


def _is_of_a_text(kept: object) -> bool:
    """Leaves out what the libraries of other tests in this process make meanwhile."""
    return isinstance(kept, torch.Tensor) or type(kept).__module__.startswith("lp.")


def test_many_texts_leave_nothing(model: Any, cases: Callable[[int, int], range]) -> None:
    """Joins, cancels and failures mixed: slots that are lost, or a text that is kept, would add up."""

    def fails(tokens: list[int], step: int) -> None:
        raise RuntimeError("a callback")

    rng = random.Random(11)
    decoder = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=3, ngram_size=3, guess_set_size=5))
    engine = lp.Engine(decoder, cache_tokens=600)  # full soon: caches kept for reuse are as many in all that follows
    engine.pool.check()
    count = len(cases(150, 2000))
    expected = {length: plain_greedy(model, list(range(1, length + 1)), 12) for length in (3, 20, 33)}
    left: list[tuple[int, lp.Handle]] = []
    submitted = done = cancelled = failed = 0
    sizes: list[int] = []
    while submitted < count or left:
        while submitted < count and engine.waiting < 4:
            length = rng.choice([*expected])
            callback = fails if rng.random() < 0.05 else None
            ids = list(range(1, length + 1)) if rng.random() < 0.8 else drawn_text(rng, 30)
            handle = engine.submit(ids, 12, on_tokens=callback)
            left.append((length if ids == list(range(1, length + 1)) else 0, handle))
            submitted += 1
        if rng.random() < 0.05:
            engine.cancel(rng.choice(left)[1])
        engine.step()
        engine.pool.check()
        for length, handle in [pair for pair in left if pair[1].done]:
            left.remove((length, handle))
            if handle.error:
                failed += 1
            elif handle.result().finish_reason == "cancelled":
                cancelled += 1
            else:
                assert not length or handle.result().tokens == expected[length]
                done += 1
        if submitted >= (len(sizes) + 1) * count // 10:
            gc.collect()
            sizes.append(sum(map(_is_of_a_text, gc.get_objects())))
    assert done + cancelled + failed == count and cancelled and failed
    assert not engine.running and not engine.waiting
    half = len(sizes) // 2
    assert max(sizes[half:]) < 1.1 * max(sizes[:half]), sizes
