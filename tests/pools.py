"""Pools without a model: tables with weights of the test's own, drawn steps, and drawn switches."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lp.config import LookaheadConfig
from lp.lookahead.candidates import StepReads
from lp.lookahead.mixture import FEATURES
from lp.lookahead.pool import NGramPool
from lp.lookahead.tables import Tables, new_tables

TEXT_ONLY: dict[str, Any] = {"window_ngrams": False, "position_guesses": False, "recycled": 0}


def empty_tables(config: LookaheadConfig, weights: np.ndarray | None = None) -> Tables:
    """Empty, with these weights, or none that favours anything: the shipped ones change whenever they are learned."""
    zeros = np.zeros(FEATURES)
    return new_tables(config.recycled, config.pool_mib, zeros if weights is None else weights, zeros + 1)


def pool_of(
    prompt: Sequence[int], noise: tuple[int, int] | None = None, tables: Tables | None = None, **config: Any
) -> NGramPool:
    """A pool of the smallest size with these switches."""
    made = LookaheadConfig(**{"pool_mib": 1} | config)
    return NGramPool(made, prompt, noise, tables or empty_tables(made))


def harvested(rows: Iterable[Iterable[tuple[int, float]]]) -> np.ndarray:
    """(token, logit) of every row as a step packs them: (n, K) int64."""
    packed = [[token << 32 | int(np.float32(logit).view(np.uint32)) for token, logit in row] for row in rows]
    return np.array(packed, np.int64).reshape(len(packed), -1)


def reads_of(
    position: int, slots: Sequence[tuple[int, int, int]], harvest: np.ndarray, ngrams: Sequence[tuple[int, ...]] = ()
) -> StepReads:
    """A step whose slots are (token, parent, what it chose); the first stands at `position`."""
    positions: list[int] = []
    for _, parent, _ in slots:
        positions.append(positions[parent] + 1 if parent >= 0 else position)
    tokens, parents, chosen = ([slot[item] for slot in slots] for item in range(3))
    return StepReads(tokens, positions, parents, range(len(slots)), chosen, harvest, ngrams)


def drawn_step(rng: random.Random, text: Sequence[int], kinds: int, k: int) -> tuple[list[int], StepReads]:
    """New tokens, and what a step behind the text may have read: any tree, any logits."""
    new = [rng.randrange(kinds) if rng.random() < 0.3 else rng.choice(text) for _ in range(rng.randint(1, 4))]
    slots = [(text[-1], -1, new[0])]
    for slot in range(1, rng.randint(1, 12)):
        slots.append((rng.randrange(kinds), rng.randrange(slot), rng.randrange(kinds)))
    rows = [[(token, rng.gauss(0, 4)) for token in rng.sample(range(kinds), k)] for _ in slots]
    ngrams = [tuple(rng.randrange(kinds) for _ in range(4)) for _ in range(rng.randint(0, 5))]
    return new, reads_of(len(text) - 1, slots, harvested(rows), ngrams)


def drawn_switches(rng: random.Random) -> dict[str, Any]:
    """What the pool listens to; K may be more than the tiny models' vocabulary."""
    switches = ("prompt_ngrams", "output_ngrams", "window_ngrams", "position_guesses", "renoise", "learn")
    on: dict[str, Any] = {name: rng.random() < 0.7 for name in switches}
    return on | {"recycled": rng.choice([0, 4, 16, 16, 100]), "pool_mib": rng.choice([1, 16])}
