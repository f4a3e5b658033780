"""The pool (paper section 3.2): what may follow the text, from all that was read and said, as a tree of candidates.

K: harvested tokens of a row, n: rows read, S: slots of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lp.config import LookaheadConfig
from lp.lookahead.candidates import StepReads, TokenTree
from lp.lookahead.compiled import U64, given, ints, jit, zeros
from lp.lookahead.mixture import (
    DEEPEST,
    FEATURES,
    FLOOR,
    GUESS,
    ORDERS,
    RECYCLED,
    TEXT,
    VOTED,
    WINDOW,
    M,
    Scratch,
    Tables,
    claim,
    hash_history,
    learn,
    predict,
    recycled_key,
    remember,
    tagged,
)
from lp.lookahead.noise import sequence_key


@jit
def recall(s, node, tail, n_tail):
    """Fill the history with the tokens up to a node, newest first; returns how many."""
    known = 0
    while node > 0 and known < DEEPEST:
        s.history[known] = s.node_tokens[node]
        node = s.node_parents[node]
        known += 1
    place = 0
    while place < n_tail and known < DEEPEST:
        s.history[known] = tail[place]
        known, place = known + 1, place + 1
    return known


@jit
def expand(t, s, node, tail, n_tail, position, base_key, noisy, sources):
    """Predict what follows a node and line its tokens up, likeliest first."""
    known = recall(s, node, tail, n_tail)
    voted, _ = predict(t, s, known, position + s.node_depths[node] + 1, base_key, noisy, sources)
    base = node * VOTED
    for index in range(voted):
        chance, place = s.scores[index], index
        while place > 0 and s.voted_chances[base + place - 1] < chance:
            s.voted_chances[base + place] = s.voted_chances[base + place - 1]
            s.voted_tokens[base + place] = s.voted_tokens[base + place - 1]
            place -= 1
        s.voted_chances[base + place], s.voted_tokens[base + place] = chance, s.tokens[index]
    if voted < VOTED:
        s.voted_chances[base + voted] = 0.0
    s.node_next[node], s.node_values[node] = 0, s.node_chances[node] * s.voted_chances[base]


@jit
def grow(t, s, tail, n_tail, position, base_key, noisy, sources, budget, deepest, row, column):
    """Grow the tree behind `c`, always by the token most likely to be accepted; returns its nodes, the root included.

    Nodes that repeat row 0 or column 0 of the window cost no row.
    """
    s.node_tokens[0] = tail[0]
    s.node_parents[0], s.node_depths[0], s.node_chances[0], s.node_row[0], s.node_column[0] = -1, 0, 1.0, 0, 0
    nodes, rows = 1, 0
    expand(t, s, 0, tail, n_tail, position, base_key, noisy, sources)
    while nodes < len(s.node_tokens):
        parent = 0
        for node in range(1, nodes):
            if s.node_values[node] > s.node_values[parent]:
                parent = node
        if s.node_values[parent] < FLOOR:
            break
        choice = parent * VOTED + s.node_next[parent]
        token, place = s.voted_tokens[choice], s.node_row[parent]
        in_row = place + 1 if 0 <= place < len(row) - 1 and row[place + 1] == token else -1
        place = s.node_column[parent]
        in_column = place + 1 if 0 <= place < len(column) - 1 and column[place + 1] == token else -1
        if in_row < 0 and in_column < 0:
            if rows == budget:
                break
            rows += 1
        s.node_tokens[nodes], s.node_parents[nodes] = token, parent
        s.node_depths[nodes] = s.node_depths[parent] + 1
        s.node_chances[nodes] = s.node_values[parent]
        s.node_row[nodes], s.node_column[nodes] = in_row, in_column
        s.node_values[nodes] = 0.0
        s.node_next[parent] += 1
        following = choice + 1
        s.node_values[parent] = 0.0
        if s.node_next[parent] < VOTED:
            s.node_values[parent] = s.node_chances[parent] * s.voted_chances[following]
        if s.node_depths[nodes] < deepest:
            expand(t, s, nodes, tail, n_tail, position, base_key, noisy, sources)
        nodes += 1
    return nodes


@jit
def absorb_text(t, s, text, start):
    """Remember what followed every context of the text, for the tokens from `start` on."""
    for end in range(max(start, 1), len(text)):
        known = min(end, DEEPEST)
        for place in range(known):
            s.history[place] = text[end - 1 - place]
        hash_history(s, known)
        for index in range(len(ORDERS)):
            if ORDERS[index] <= known:
                remember(t, tagged(s.hashes[ORDERS[index]], TEXT, 0), text[end])


@jit
def study(t, s, text, start, base_key, noisy, sources):
    """Learn the weights from the tokens from `start` on."""
    for end in range(start, len(text)):
        known = min(end, DEEPEST)
        for place in range(known):
            s.history[place] = text[end - 1 - place]
        voted, votes = predict(t, s, known, end, base_key, noisy, sources)
        learn(t, s, voted, votes, text[end])


@jit
def absorb_reads(t, s, tail, n_tail, tokens, parents, positions, reads, chosen, top_tokens, top_logits, sources):
    """Remember what every row read said: its token at this position, and its logits behind its last tokens."""
    width = len(s.noised)
    for place in range(len(reads)):
        slot, known = reads[place], 0
        position = positions[slot] + 1
        while slot > 0 and known < 3:
            s.history[known] = tokens[slot]
            slot, known = parents[slot], known + 1
        back = 0
        while slot == 0 and back < n_tail and known < 3:
            s.history[known] = tail[back]
            known, back = known + 1, back + 1
        hash_history(s, known)
        if sources >> GUESS & 1:
            for order in range(min(known, 2) + 1):
                remember(t, tagged(s.hashes[order], GUESS, position), chosen[place])
        if sources >> RECYCLED & 1:
            for order in range(known + 1):
                key = recycled_key(s, order, position)
                entry, _ = claim(t.recycled_keys, t.recycled_stamps, key, t.clock[0])
                t.recycled_at[entry] = position
                for k in range(width):
                    t.recycled_tokens[entry * width + k] = top_tokens[2 * (place * width + k) + 1]
                    t.recycled_logits[entry * width + k] = top_logits[2 * (place * width + k)]


@jit
def absorb_ngrams(t, s, ngrams, length):
    """Remember what followed one and two tokens within the window's n-grams of `length` tokens."""
    for first in range(0, len(ngrams), length):
        for end in range(first + 1, first + length):
            known = min(end - first, 2)
            for place in range(known):
                s.history[place] = ngrams[end - 1 - place]
            hash_history(s, known)
            for order in range(1, known + 1):
                remember(t, tagged(s.hashes[order], WINDOW, 0), ngrams[end])


class NGramPool:
    """The main source of candidates: text and window n-grams, position guesses, recycled logits, in one mixture.

    Args:
        config: its sources, depth and shape.
        prompt: the text so far.
        noise: (seed, sequence) of the sampler's noise; None when text is not chosen under it.
    """

    def __init__(self, config: LookaheadConfig, prompt: Sequence[int], noise: tuple[int, int] | None = None) -> None:
        self.config, self.harvest = config, config.recycled
        on = {TEXT: True, WINDOW: config.window_ngrams, GUESS: config.position_guesses, RECYCLED: config.recycled > 0}
        self._sources = sum(1 << source for source, wanted in on.items() if wanted)
        self._noise = (U64(sequence_key(*noise)), True) if noise and config.renoise else (U64(0), False)
        self._tables = new_tables(config.recycled)
        nodes = 2 + config.row_budget + config.window_size + config.ngram_size
        self._scratch = new_scratch(nodes, config.recycled)
        self._text = np.zeros(2 * len(prompt) + 1024, np.int64)
        self._length = 0
        self._extend(prompt)
        if config.prompt_ngrams:
            absorb_text(self._tables, self._scratch, self._said(), 0)

    def propose(
        self, text: Sequence[int], budget: int, row: Sequence[int] = (), column: Sequence[int] = ()
    ) -> TokenTree:
        """The tree of `budget` rows most likely to be accepted; what repeats row 0 or column 0 costs none."""
        s = self._scratch
        tail, n_tail = self._tail(self._length)
        shape = (budget, self.config.depth, ints(row or text[-1:]), ints(column or text[-1:]))
        nodes = grow(self._tables, s, tail, n_tail, self._length - 1, *self._noise, self._sources, *shape)
        tree = TokenTree(budget)
        tree.tokens = np.asarray(s.node_tokens)[1:nodes].tolist()
        tree.parents = (np.asarray(s.node_parents)[1:nodes] - 1).tolist()
        tree.chances = np.asarray(s.node_chances)[1:nodes].tolist()
        return tree

    def observe(self, text: Sequence[int], moved: int, seen: StepReads) -> None:
        """Learn the weights from the step's tokens, then remember what it read and said."""
        t, s, sources = self._tables, self._scratch, self._sources
        start, tail = self._length, self._tail(self._length)
        t.clock[0] += 1
        self._extend(text[len(text) - moved :])
        if self.config.learn:
            study(t, s, self._said(), start, *self._noise, sources)
        packed = np.ascontiguousarray(seen.harvest)
        slots = map(ints, (seen.tokens, seen.parents, seen.positions, seen.slots, seen.chosen))
        tops = (given(packed.view(dtype).ravel()) for dtype in (np.int32, np.float32))
        absorb_reads(t, s, *tail, *slots, *tops, sources)
        if self._sources >> WINDOW & 1 and seen.ngrams:
            absorb_ngrams(t, s, ints([token for ngram in seen.ngrams for token in ngram]), len(seen.ngrams[0]))
        if self.config.output_ngrams:
            absorb_text(t, s, self._said(), start)

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


def new_tables(recycled: int, contexts: int = 1 << 17, rows: int = 1 << 15) -> Tables:
    """Empty tables: 44 bytes a context and 24 + 8 K a row of logits."""
    return Tables(
        zeros(contexts, "u8"), zeros(contexts, "i8"), zeros(contexts * M, "i4"), zeros(contexts * M, "i4"),
        zeros(rows, "u8"), zeros(rows, "i8"), zeros(rows, "i8"), zeros(rows * recycled, "i4"),
        zeros(rows * recycled, "f4"), zeros(FEATURES, "f8"), given(np.ones(FEATURES)), zeros(1, "i8"),
    )  # fmt: skip


def new_scratch(nodes: int, recycled: int) -> Scratch:
    """Room for trees of so many nodes."""
    votes = 2 * (len(ORDERS) * M + 5 * M + recycled + 1)
    return Scratch(
        zeros(DEEPEST, "i8"), zeros(DEEPEST + 1, "u8"), zeros(votes, "i8"), zeros(VOTED, "i8"),
        zeros(VOTED + 1, "f8"), zeros(recycled, "f8"), zeros(nodes, "i8"), zeros(nodes, "i8"), zeros(nodes, "i8"),
        zeros(nodes, "f8"), zeros(nodes, "i8"), zeros(nodes, "f8"), zeros(nodes, "i8"), zeros(nodes, "i8"),
        zeros(nodes * VOTED, "i8"), zeros(nodes * VOTED, "f8"),
    )  # fmt: skip
