"""The pool (paper section 3.2): what may follow the text, from all that was read and said, as a tree of candidates.

K: kept tokens of a row, n: rows read, S: slots of a step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from lp.compiled import U64, given, ints
from lp.config import LookaheadConfig
from lp.digest import chain_digest
from lp.draft.pool.mixture import grow, study
from lp.draft.pool.tables import (
    DEEPEST,
    GUESS,
    RECYCLED,
    TEXT,
    WINDOW,
    Tables,
    absorb_ngrams,
    absorb_reads,
    absorb_text,
    new_scratch,
    new_tables,
)
from lp.draft.source import StepSamples, TokenPrice
from lp.draft.tree import DraftTree
from lp.sampling.noise import sequence_key
from lp.sampling.top_logits import TopLogits

MOST_SQUARES = 50.0


class NGramPool:
    """The main source of candidates: text and window n-grams, position guesses, recycled logits, in one mixture.

    Args:
        config: its sources, depth and shape.
        prompt: the text so far.
        noise: (seed, sequence) of the sampler's noise; None when text is not chosen under it.
        tables: what it remembers, from `fresh_tables` or an earlier text.
    """

    def __init__(
        self, config: LookaheadConfig, prompt: Sequence[int], noise: tuple[int, int] | None, tables: Tables
    ) -> None:
        self.config, self.num_logits = config, len(tables.recycled_tokens) // len(tables.recycled_keys)
        on = {TEXT: True, WINDOW: config.window_ngrams, GUESS: config.position_guesses, RECYCLED: self.num_logits > 0}
        self._sources = sum(1 << source for source, wanted in on.items() if wanted)
        self._noise = (U64(sequence_key(*noise)), True) if noise and config.renoise else (U64(0), False)
        self._tables = tables
        tables.clock[0] += 1  # so that what the prompt leaves is newer than an empty place
        tables.clock[1] += 1
        nodes = 2 + config.draft_budget + config.window_size + config.ngram_size
        self._scratch = new_scratch(nodes, self.num_logits)
        self._text = np.zeros(2 * len(prompt) + 1024, np.int64)
        self._length = 0
        self._extend(prompt)
        if config.prompt_ngrams:
            absorb_text(tables, self._scratch, self._said(), 0)

    def propose(
        self,
        text: Sequence[int],
        budget: int,
        row: Sequence[int] = (),
        column: Sequence[int] = (),
        price: TokenPrice | None = None,
    ) -> DraftTree:
        """The tree of the rows most likely to be accepted, as far as they pay; what the window has costs none."""
        s = self._scratch
        self._follow(text)
        tail, n_tail = self._tail(self._length)
        cost = price or TokenPrice.free(budget)
        terms = (
            cost.tokens_per_s,
            cost.base_tokens,
            cost.seconds,
            cost.marginal_seconds,
            cost.exploration_bonus,
            cost.exploration_tokens,
            cost.calibration,
            cost.depth_discount,
        )
        shape = (budget, self.config.depth, ints(row or text[-1:]), ints(column or text[-1:]), terms)
        nodes = grow(self._tables, s, tail, n_tail, self._length - 1, *self._noise, self._sources, *shape)
        tree = DraftTree(budget)
        tree.tokens = np.asarray(s.node_tokens)[1:nodes].tolist()
        tree.parents = (np.asarray(s.node_parents)[1:nodes] - 1).tolist()
        tree.accept_probs = np.asarray(s.node_chances)[1:nodes].tolist()
        return tree

    def begin(self, prompt: Sequence[int], top_logits: TopLogits) -> None:
        """The prompt's rows leave their logits behind its tokens."""
        places = range(len(prompt) - 1)
        slots = StepSamples(prompt, places, range(-1, len(places) - 1), places, prompt[1:], top_logits, ())
        self._absorb((ints(prompt[:1]), 1), slots, self._sources & 1 << RECYCLED)

    def observe(self, text: Sequence[int], moved: int, seen: StepSamples) -> None:
        """Learn the weights from the step's tokens, then remember what it read and said."""
        t, s, sources = self._tables, self._scratch, self._sources
        self._follow(text[: len(text) - moved])
        start, tail = self._length, self._tail(self._length)
        t.clock[0] += 1
        self._extend(text[len(text) - moved :])
        if self.config.learn:
            study(t, s, self._said(), start, *self._noise, sources)
        self._absorb(tail, seen, sources)
        if self._sources >> WINDOW & 1 and seen.ngrams:
            absorb_ngrams(t, s, ints([token for ngram in seen.ngrams for token in ngram]), len(seen.ngrams[0]))
        if self.config.output_ngrams:
            absorb_text(t, s, self._said(), start)

    def _follow(self, text: Sequence[int]) -> None:
        """Catch up with steps that were not shown."""
        start = self._length
        if start < len(text):
            self._extend(text[start:])
            if self.config.output_ngrams:
                absorb_text(self._tables, self._scratch, self._said(), start)

    def _absorb(self, tail: tuple[Any, int], seen: StepSamples, sources: int) -> None:
        tokens, parents, positions = map(ints, (seen.tokens, seen.parents, seen.positions))
        top_tokens, top_logits = map(given, seen.top_logits)
        said = ints(seen.nodes), ints(seen.sampled), top_tokens, top_logits
        absorb_reads(self._tables, self._scratch, tail, tokens, parents, positions, said, sources)

    def _said(self) -> Any:
        return given(self._text[: self._length])

    def _tail(self, length: int) -> tuple[Any, int]:
        tail = self._text[max(length - DEEPEST, 0) : length][::-1]
        return given(tail.copy()), len(tail)

    def _extend(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._text):
            self._text = np.concatenate([self._text, np.zeros(end, np.int64)])
        self._text[self._length : end] = tokens
        self._length = end


def fresh_tables(config: LookaheadConfig, vocabulary: int) -> Tables:
    """Empty, with the weights that scripts/train_pool_weights.py learned."""
    prior = _prior()
    squares = 1 + np.minimum(prior["squares"], MOST_SQUARES)  # so that they still move
    return new_tables(min(config.recycled, vocabulary), config.pool_mib, prior["weights"], squares)


@lru_cache(maxsize=1)
def _prior() -> dict[str, np.ndarray]:
    return load_file(Path(__file__).with_name("weights.safetensors"))


def save_tables(tables: Tables, path: str) -> None:
    """Write them to one safetensors file, whole or not at all."""
    arrays = {name: np.asarray(values) for name, values in tables._asdict().items()}
    scratch = Path(f"{path}.{os.getpid()}.part")
    try:
        save_file(arrays, scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def load_tables(tables: Tables, path: str, vocabulary: int) -> None:
    """Replace what fresh tables remember by what a file does.

    Raises:
        ValueError: it is no pool, or one of another size.
    """
    try:
        arrays = load_file(path)
    except Exception as error:
        raise ValueError(f"pool_file {path} can't be read as safetensors ({error}); delete it to begin anew") from None
    for name, values in tables._asdict().items():
        mine, theirs = np.asarray(values), arrays.get(name)
        if theirs is None or theirs.shape != mine.shape or theirs.dtype != mine.dtype:
            raise ValueError(f"pool_file {path} is of another pool_mib, recycled or version; delete it to begin anew")
        mine[:] = theirs
    followers, recycled = np.asarray(tables.followers) >> 32, np.asarray(tables.recycled_tokens)
    largest = max(int(followers.max()) - 1, int(recycled.max(initial=0)))
    if largest >= vocabulary:
        raise ValueError(f"pool_file {path} has token {largest}, the model {vocabulary}; it is another model's")


def tables_digest(tables: Tables) -> int:
    """A digest of everything remembered, equal on every machine."""
    return chain_digest(0, *(np.asarray(values).view(np.int32) for values in tables))
