"""What the pool remembers: followers of contexts, and logits of rows, in hash tables of fixed size.

A context is the hash of its last tokens and of who remembers it; the oldest of a bucket makes room. All arithmetic of
the compiled functions is of integers and of + - * / on doubles in a fixed order, logarithm and exponential included:
ranks on unlike processors compute the same bits.

E: contexts, F: rows of logits, K: logits of a row, M: followers of a context.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lp.compiled import I64, U64, given, jit, zeros

MASK, GOLDEN = U64((1 << 64) - 1), U64(0x9E3779B97F4A7C15)
MIX_1, MIX_2, ONE = U64(0xBF58476D1CE4E5B9), U64(0x94D049BB133111EB), U64(1)
S11, S27, S30, S31 = U64(11), U64(27), U64(30), U64(31)

M, WAYS, DEEPEST, VOTED = 4, 4, 8, 32  # followers; ways of a table; longest context; tokens voted for at a node
ORDERS = (1, 2, 3, 4, 6, 8)  # of text contexts
TEXT, WINDOW, GUESS, RECYCLED = 1, 2, 3, 4  # who remembers; bit 1 << source switches a source on
# Of the contexts that may vote for one token, the first of each source (by order, from 0 on; the window's from 1 on).
WINDOWS, GUESSES, ROWS = len(ORDERS) - 1, len(ORDERS) + 2, len(ORDERS) + 5
CONTEXTS = ROWS + 4


class Tables(NamedTuple):
    """What is remembered; flat arrays, whose sizes are powers of two times their width."""

    keys: Any  # uint64 (E,): contexts, tagged by source; 0 is empty
    stamps: Any  # int64 (E,): when a context was last written
    followers: Any  # int64 (E * M,): token + 1 << 32 | how often, the newest first; 0 is empty
    recycled_keys: Any  # uint64 (F,)
    recycled_stamps: Any  # int64 (F,)
    recycled_at: Any  # int64 (F,): position that the logits were for
    recycled_tokens: Any  # int32 (F * K,)
    recycled_logits: Any  # float32 (F * K,)
    weights: Any  # float64 (FEATURES,)
    squares: Any  # float64 (FEATURES,): of the gradients seen
    clock: Any  # int64 (2,): steps, texts


class Scratch(NamedTuple):
    """Room for one prediction and for the tree."""

    history: Any  # int64 (DEEPEST,): the context, newest token first
    hashes: Any  # uint64 (DEEPEST + 1,): of its last tokens, by how many
    contexts: Any  # uint64 (CONTEXTS,): that may vote, 0 for one that is off
    entries: Any  # int64 (CONTEXTS + 1,): where they are, -1 for nowhere
    votes: Any  # int64 (2 * most votes,): (token's index, feature)
    tokens: Any  # int64 (VOTED,)
    scores: Any  # float64 (VOTED + 1,): then chances; the last is "none of them"
    noised: Any  # float64 (K,)
    node_tokens: Any  # int64 (nodes,)
    node_parents: Any  # int64 (nodes,)
    node_depths: Any  # int64 (nodes,)
    node_chances: Any  # float64 (nodes,): of being accepted
    node_voted: Any  # int64 (nodes,): how many tokens may follow
    node_next: Any  # int64 (nodes,): which of them is the next to try
    node_values: Any  # float64 (nodes,): its chance of being accepted
    node_row: Any  # int64 (nodes,): place in row 0, -1 for none
    node_column: Any  # int64 (nodes,): place in column 0, -1 for none
    voted_tokens: Any  # int64 (nodes * VOTED,)
    voted_chances: Any  # float64 (nodes * VOTED,), 0 for what is in the tree


def new_tables(recycled: int, mebibytes: int, weights: np.ndarray, squares: np.ndarray) -> Tables:
    """Empty tables of at most so many bytes, the larger part for contexts, with these weights of the mixture.

    Args:
        recycled: K.
    """
    room = (mebibytes << 20) - 2 * weights.nbytes - 16
    context, row = 16 + 8 * M, 24 + 8 * recycled  # bytes of one
    contexts = _power_below(room // context // (2 if recycled else 1))
    rows = _power_below((room - context * contexts) // row) if recycled else WAYS
    return Tables(
        zeros(contexts, "u8"), zeros(contexts, "i8"), zeros(contexts * M, "i8"),
        zeros(rows, "u8"), zeros(rows, "i8"), zeros(rows, "i8"), zeros(rows * recycled, "i4"),
        zeros(rows * recycled, "f4"), given(weights.copy()), given(squares.copy()), zeros(2, "i8"),
    )  # fmt: skip


def _power_below(count: int) -> int:
    return 1 << max(count.bit_length() - 1, 2)


def new_scratch(nodes: int, recycled: int) -> Scratch:
    """Room for trees of so many nodes."""
    votes = 2 * (len(ORDERS) * M + 5 * M + recycled + 1)
    return Scratch(
        zeros(DEEPEST, "i8"), zeros(DEEPEST + 1, "u8"), zeros(CONTEXTS, "u8"), zeros(CONTEXTS + 1, "i8"),
        zeros(votes, "i8"), zeros(VOTED, "i8"), zeros(VOTED + 1, "f8"), zeros(recycled, "f8"), zeros(nodes, "i8"),
        zeros(nodes, "i8"), zeros(nodes, "i8"), zeros(nodes, "f8"), zeros(nodes, "i8"), zeros(nodes, "i8"),
        zeros(nodes, "f8"), zeros(nodes, "i8"), zeros(nodes, "i8"),
        zeros(nodes * VOTED, "i8"), zeros(nodes * VOTED, "f8"),
    )  # fmt: skip


@jit
def mix(value):  # splitmix64
    value = ((value ^ (value >> S30)) * MIX_1) & MASK
    value = ((value ^ (value >> S27)) * MIX_2) & MASK
    return value ^ (value >> S31)


@jit
def bucket(keys, key):
    """The first of the places that a context may take."""
    return (I64(key >> S11) & (len(keys) // WAYS - 1)) * WAYS


@jit
def find(keys, key):
    """Where a context is, or -1."""
    first, found = bucket(keys, key), -1
    for place in range(first, first + WAYS):  # to the end: no branch for the processor to guess
        found = place if keys[place] == key else found
    return found if key != 0 else -1


@jit
def claim(keys, stamps, key, now):
    """Where a context is, or the oldest place that it may take, and whether it was there."""
    first = oldest = bucket(keys, key)
    for place in range(first, first + WAYS):
        if keys[place] == key:
            stamps[place] = now
            return place, True
        if stamps[place] < stamps[oldest]:
            oldest = place
    keys[oldest], stamps[oldest] = key, now
    return oldest, False


@jit
def tagged(hashed, source, extra):
    return mix((hashed + U64(source) * GOLDEN + U64(extra) * MIX_1) & MASK) | ONE


@jit
def recall_text(s, text, start, end):
    """Fill the history with the tokens of a text from `start` up to `end`; returns how many fitted."""
    known = min(end - start, DEEPEST)
    for place in range(known):
        s.history[place] = text[end - 1 - place]
    return known


@jit
def hash_history(s, known):
    """Hashes of the newest 1, 2, ... `known` tokens of the context."""
    value = s.hashes[0] = GOLDEN
    for order in range(1, known + 1):
        value = mix((value + U64(s.history[order - 1] + 1) * GOLDEN) & MASK)
        s.hashes[order] = value


@jit
def look_up(t, s, known, here, sources):
    """Find every context that may vote.

    Memory answers many questions as fast as one where none waits for another: first a key of every bucket is read,
    then the entries are found and a follower of each is read.
    """
    for index in range(CONTEXTS):
        s.contexts[index] = 0
    for index in range(len(ORDERS)):
        if sources >> TEXT & 1 and ORDERS[index] <= known:
            s.contexts[index] = tagged(s.hashes[ORDERS[index]], TEXT, 0)
    for length in range(min(known, 2) + 1):
        if sources >> WINDOW & 1 and length:
            s.contexts[WINDOWS + length] = tagged(s.hashes[length], WINDOW, 0)
        if sources >> GUESS & 1:
            s.contexts[GUESSES + length] = tagged(s.hashes[length], GUESS, here)
    for order in range(min(known, 3) + 1):
        if sources >> RECYCLED & 1:
            s.contexts[ROWS + order] = recycled_key(s, order, here)
    touched = I64(0)
    for index in range(ROWS):
        touched += I64(t.keys[bucket(t.keys, s.contexts[index])] & ONE)
    for index in range(ROWS, CONTEXTS):
        touched += I64(t.recycled_keys[bucket(t.recycled_keys, s.contexts[index])] & ONE)
    for index in range(ROWS):
        s.entries[index] = entry = find(t.keys, s.contexts[index])
        touched += t.followers[max(entry, 0) * M] & 1
    for index in range(ROWS, CONTEXTS):
        s.entries[index] = find(t.recycled_keys, s.contexts[index])
    s.entries[CONTEXTS] = touched  # or the compiler would leave the reads out


@jit
def remember(t, key, token):
    """Make a token the newest follower of a context."""
    entry, there = claim(t.keys, t.stamps, key, t.clock[0])
    base = entry * M
    if not there:
        for rank in range(M):
            t.followers[base + rank] = 0
    rank = 0
    while rank < M - 1 and t.followers[base + rank] >> 32 != token + 1 and t.followers[base + rank] != 0:
        rank += 1
    known = t.followers[base + rank]
    while rank > 0:
        t.followers[base + rank] = t.followers[base + rank - 1]
        rank -= 1
    t.followers[base] = known + 1 if known >> 32 == token + 1 else (token + 1 << 32) + 1


@jit
def placed(t, position):
    """A position of this very text, which a later one does not share."""
    return position + (t.clock[1] << 32)


@jit
def recycled_key(s, order, place):
    """The newest `order` tokens of the context; none of them stands for the place alone."""
    return tagged(s.hashes[order], RECYCLED, 0 if order else place)


@jit
def absorb_text(t, s, text, start):
    """Remember what followed every context of the text, for the tokens from `start` on."""
    for end in range(max(start, 1), len(text)):
        known = recall_text(s, text, 0, end)
        hash_history(s, known)
        for index in range(len(ORDERS)):
            if ORDERS[index] <= known:
                remember(t, tagged(s.hashes[ORDERS[index]], TEXT, 0), text[end])


@jit
def absorb_reads(t, s, context, tokens, parents, positions, said, sources):
    """Remember what every row read said: its token at this position, and its logits behind its last tokens."""
    (tail, n_tail), (reads, chosen, top_tokens, top_logits) = context, said
    width = len(s.noised)
    for place in range(len(reads)):
        slot, known = reads[place], 0
        position = placed(t, positions[slot] + 1)
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
                    t.recycled_tokens[entry * width + k] = top_tokens[place, k]
                    t.recycled_logits[entry * width + k] = top_logits[place, k]


@jit
def absorb_ngrams(t, s, ngrams, length):
    """Remember what followed one and two tokens within the window's n-grams of `length` tokens."""
    for first in range(0, len(ngrams), length):
        for end in range(first + 1, first + length):
            known = recall_text(s, ngrams, max(first, end - 2), end)
            hash_history(s, known)
            for order in range(1, known + 1):
                remember(t, tagged(s.hashes[order], WINDOW, 0), ngrams[end])
