"""Pools without a model: tables with weights of the test's own, drawn steps, and drawn switches."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lp.budget.step_times import StepTimes
from lp.compiled import COMPILED
from lp.config import LookaheadConfig
from lp.digest import chain_digest
from lp.draft.layout import ancestors
from lp.draft.pool.factory import tables_digest
from lp.draft.pool.mixture import FEATURES, GUESS_0, LOGITS_0, NONE_0, TEXT_0, WINDOW_0, predict
from lp.draft.pool.ngram_pool import NGramPool
from lp.draft.pool.tables import ORDERS, Tables, new_tables
from lp.draft.share import Share
from lp.draft.source import ShareInput, StepSamples
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.sampling.top_logits import TopLogits
from tests.support.switches import lookahead_config

TEXT_ONLY: dict[str, Any] = {"window_ngrams": False, "position_guesses": False, "num_logits": 0}


def empty_tables(config: LookaheadConfig, weights: np.ndarray | None = None) -> Tables:
    """A pool's empty tables, with these weights or even ones: the shipped ones change whenever they are learned."""
    zeros = np.zeros(FEATURES)
    return new_tables(config.ablation.num_logits, config.pool_mib, zeros if weights is None else weights, zeros + 1)


def pool_of(
    prompt: Sequence[int], noise: tuple[int, int] | None = None, tables: Tables | None = None, **config: Any
) -> NGramPool:
    """A pool of the smallest size, with these switches of the config, for a prompt."""
    made = lookahead_config(**{"pool_mib": 1} | config)
    return NGramPool(made, prompt, noise, tables or empty_tables(made))


def logits_of(rows: Iterable[Iterable[tuple[int, float]]]) -> TopLogits:
    """Top-k logits whose nodes have these (token, logit) pairs, as a message would carry them."""
    pairs = [list(row) for row in rows]
    shape = len(pairs), len(pairs[0]) if pairs else 0
    tokens = np.array([token for row in pairs for token, _ in row], np.int32)
    logits = np.array([logit for row in pairs for _, logit in row], np.float32)
    return TopLogits(tokens.reshape(shape), logits.reshape(shape))


def reads_of(
    position: int, nodes: Sequence[tuple[int, int, int]], top_logits: TopLogits, ngrams: Sequence[tuple[int, ...]] = ()
) -> StepSamples:
    """A step whose nodes are (token, parent, what it chose); the first stands at `position`."""
    positions: list[int] = []
    for _, parent, _ in nodes:
        positions.append(positions[parent] + 1 if parent >= 0 else position)
    tokens, parents, chosen = ([node[item] for node in nodes] for item in range(3))
    return StepSamples.of(tokens, positions, parents, chosen, top_logits, ngrams)


def share_of(pool: NGramPool, text: Sequence[int], step: ShareInput) -> Share:
    """A rank's share of the drafts, as lists, which can be compared with ==."""
    share = pool.propose_share(text, step)
    draft = share.draft
    lists = (np.asarray(field).tolist() for field in (draft.tokens, draft.parents, draft.accept_probs))
    return Share(DraftTree(*lists), share.common)


def drawn_step(rng: random.Random, text: Sequence[int], kinds: int, k: int) -> tuple[list[int], StepSamples]:
    """New tokens, and what a step behind the text may have read: any tree, any logits."""
    new = [rng.randrange(kinds) if rng.random() < 0.3 else rng.choice(text) for _ in range(rng.randint(1, 4))]
    nodes = [(text[-1], -1, new[0])]
    for node in range(1, rng.randint(1, 12)):
        nodes.append((rng.randrange(kinds), rng.randrange(node), rng.randrange(kinds)))
    rows = [[(token, rng.gauss(0, 4)) for token in rng.sample(range(kinds), k)] for _ in nodes]
    ngrams = [tuple(rng.randrange(kinds) for _ in range(4)) for _ in range(rng.randint(0, 5))]
    return new, reads_of(len(text) - 1, nodes, logits_of(rows), ngrams)


def drawn_switches(rng: random.Random) -> dict[str, Any]:
    """What the pool listens to; K may be more than the tiny models' vocabulary."""
    sources = ("prompt_ngrams", "prompt_logits", "output_ngrams", "window_ngrams", "position_guesses")
    on: dict[str, Any] = {name: rng.random() < 0.7 for name in (*sources, "renoise", "learn")}
    on["adaptive"] = rng.random() < 0.4
    return on | {"num_logits": rng.choice([0, 4, 16, 16, 32]), "pool_mib": rng.choice([1, 16])}


def drawn_step_times(rng: random.Random) -> StepTimes:
    """What steps might take somewhere: rows free or dear, with bumps; plain decoding cheaper or not."""
    rows = sorted({1, *rng.sample(range(2, 200), rng.randint(0, 8)), 200})
    slope, bumps = rng.choice([0.0, 0.01, 0.1, 1.0]), rng.random() < 0.4
    seconds = [1e-3 * (1 + slope * (size - 1)) * (rng.uniform(0.3, 3) if bumps else 1) for size in rows]
    return StepTimes(tuple(rows), tuple(seconds), seconds[0] * rng.uniform(0.2, 1.2))


def graded_weights() -> np.ndarray:
    """Weights by which longer contexts of the text count more, and all else next to nothing: votes are foreseeable."""
    weights, each = np.zeros(FEATURES), (WINDOW_0 - TEXT_0) // len(ORDERS)
    for index in range(len(ORDERS)):
        weights[TEXT_0 + index * each : TEXT_0 + (index + 1) * each] = 2 * index + 2
    return weights


@dataclass
class Ballot:
    """What the pool's features voted for behind a text, to check chances by hand."""

    tokens: list[int]
    votes: list[tuple[int, int]]  # (token's index, feature); one index more is "none of them"
    accept_probs: list[float]  # of the tokens, then of none

    def sources(self) -> set[str]:
        """Names of the groups of features that voted, such as "text" and "window"."""
        starts = {"text": TEXT_0, "window": WINDOW_0, "guess": GUESS_0, "logits": LOGITS_0}
        voters = [feature for _, feature in self.votes if feature < NONE_0]
        return {max(starts, key=lambda name: starts[name] * (starts[name] <= voter)) for voter in voters}

    def log_chance(self, weights: np.ndarray, truth: int) -> float:
        """Logarithm of a token's chance by the votes alone, written out; where nobody voted for it, that of "none"."""
        scores = [0.0] * (len(self.tokens) + 1)
        for index, feature in self.votes:
            scores[index] += weights[feature]
        right = self.tokens.index(truth) if truth in self.tokens else len(self.tokens)
        return scores[right] - math.log(math.fsum(map(math.exp, scores)))


def ballot(pool: NGramPool, text: Sequence[int]) -> Ballot:
    """Collect the pool's votes for what follows the text."""
    predictor, known = pool._predictor, min(len(text), len(pool._predictor.context.tokens))
    for back in range(known):
        predictor.context.tokens[back] = text[-1 - back]
    choices, votes = predict(pool._tables, predictor, known, len(text))
    pairs = np.asarray(predictor.votes)[: 2 * votes].reshape(-1, 2).tolist()
    accept_probs = np.asarray(predictor.scores)[: choices + 1].tolist()
    return Ballot(np.asarray(predictor.tokens)[:choices].tolist(), list(map(tuple, pairs)), accept_probs)


def drawn_pool(rng: random.Random, **config: Any) -> tuple[NGramPool, list[int]]:
    """A pool with drawn weights that has seen a few steps of a text of few tokens, and the text."""
    text = [rng.randrange(20) for _ in range(20)]
    config = {"num_logits": 8, "learn": False, **config}
    weights = np.array([rng.gauss(0, 1.5) for _ in range(FEATURES)])
    noise = (rng.randrange(9), 0) if rng.random() < 0.5 else None
    pool = pool_of(text, noise, empty_tables(pool_of([1], **config).config, weights), **config)
    for _ in range(rng.randint(0, 20)):
        new, seen = drawn_step(rng, text, 20, pool.num_logits)
        text += new
        pool.observe(text, len(new), seen)
    return pool, text


def drawn_run(seed: int, steps: int, pools: int = 1) -> Iterator[tuple[list[DraftTree], list[Tables]]]:
    """Take pools that begin alike through drawn steps; yields what each proposes and its tables, before every step."""
    rng = random.Random(seed)
    text = [rng.randrange(99) for _ in range(30)]
    alike = [pool_of(text, noise=(seed, 1), guess_set_size=8) for _ in range(pools)]
    for _ in range(steps):
        row, column = ([text[-1], *(rng.choice(text) for _ in range(4))] for _ in range(2))
        budget = rng.randint(0, 30)
        yield [pool.propose(text, budget, WindowDrafts(row, column)) for pool in alike], [p._tables for p in alike]
        new, seen = drawn_step(rng, text, 99, 16)
        text += new
        for pool in alike:
            pool.observe(list(text), len(new), replace(seen, packed=seen.packed.copy()))


def proposal_digest(previous: int, tree: DraftTree) -> int:
    """A digest that differs where a proposal's nodes or any bit of their chances do; chains to the one before."""
    return chain_digest(previous, tree.tokens, tree.parents, np.array(tree.accept_probs, np.float64).view(np.int64))


def run_digests(seed: int, steps: int) -> list[int]:
    """Two digests of a drawn run, equal on every rank: its proposals with their masks; its tables every 50 steps."""
    digest, remembered = 0, 0
    for step, ((tree,), (tables,)) in enumerate(drawn_run(seed, steps), 1):
        visible = ancestors([-1, *(parent + 1 for parent in tree.parents)])
        digest = chain_digest(proposal_digest(digest, tree), visible.ravel())
        if step % 50 == 0:
            remembered = chain_digest(remembered, [tables_digest(tables)])
    return [digest, remembered]


if __name__ == "__main__":
    print(COMPILED, *run_digests(int(sys.argv[1]), int(sys.argv[2])))
