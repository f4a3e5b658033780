"""What the pool remembers: two hash tables of fixed size, one of followers of contexts, one of top-k logits.

A context is a hash of the text's newest tokens and of the kind of memory: an n-gram of the text, one of the window, a
guess for a position, or logits. An entry is found by its context's hash in a bucket of WAYS; where the bucket is full,
the entry written longest ago makes room.

All arithmetic of compiled functions is of integers and of + - * / on doubles in a fixed order, logarithm and
exponential included: ranks on unlike processors compute the same bits.

E: entries of the followers' table; F: entries of the logits' table; K: `num_logits`, logits of an entry; M: followers
of a context.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lp.compiled import GOLDEN, I64, MASK, MIX_1, ONE, U64, compiled_array, compiled_zeros, jit, mix
from lp.sampling.top_logits import INVALID_TOKEN, LOGIT, TOKEN

S11 = U64(11)  # a shift

M = 4
WAYS = 4  # entries of a bucket
MAX_CONTEXT = 8  # tokens of the longest context
ORDERS = (1, 2, 3, 4, 6, 8)  # tokens of the text's contexts
MAX_GUESS_ORDER = 2  # tokens of the longest context of a guess, and of a window n-gram
MAX_LOGITS_ORDER = 3  # tokens of the longest context of logits
TEXT, WINDOW, GUESS, LOGITS = 1, 2, 3, 4  # kinds of memory; bit 1 << kind of `sources` switches one on
MODEL = 5  # the kind of the model's n-grams, whose keys are of a table of their own


class Tables(NamedTuple):
    """What is remembered: flat arrays, whose sizes are powers of two times their width."""

    keys: Any  # uint64 (E,): contexts' hashes; 0 is empty
    stamps: Any  # int64 (E,): step at which an entry was last written
    followers: Any  # int64 (E * M,): (token + 1) << 32 | how often, the newest first; 0 is empty
    logits_keys: Any  # uint64 (F,)
    logits_stamps: Any  # int64 (F,)
    logits_positions: Any  # int64 (F,): `text_position` that the logits were for
    logits_tokens: Any  # int32 (F * K,)
    logits_values: Any  # float32 (F * K,)
    weights: Any  # float64 (FEATURES,): of the mixture
    squares: Any  # float64 (FEATURES,): sums of its squared gradients
    clock: Any  # int64 (2,): steps, texts


class Context(NamedTuple):
    """Room for the context of one look-up or update."""

    tokens: Any  # int64 (MAX_CONTEXT,), more where a corpus is looked up: the newest first
    hashes: Any  # uint64 (MAX_CONTEXT + 1,): of the newest 0, 1, 2, ... tokens


class Samples(NamedTuple):
    """What the nodes of a step sampled, as compiled functions take it; see StepSamples."""

    tokens: Any  # int64 (nodes,), like the next four
    parents: Any
    positions: Any
    sampled: Any
    starts: Any
    top_tokens: Any  # int32: the packed logits, of which 2 * (a node's start + k) + TOKEN is a token
    top_logits: Any  # float32: the same, of which 2 * (a node's start + k) + LOGIT is its logit


def new_tables(num_logits: int, mebibytes: int, weights: np.ndarray, squares: np.ndarray) -> Tables:
    """Empty tables of at most so many bytes, the larger part for followers, with these weights of the mixture.

    Args:
        num_logits: K.
    """
    room = (mebibytes << 20) - 2 * weights.nbytes - 16
    context_bytes = 16 + 8 * M
    logits_bytes = 24 + 8 * num_logits
    contexts = _power_below(room // context_bytes // (2 if num_logits else 1))
    logits = _power_below((room - context_bytes * contexts) // logits_bytes) if num_logits else WAYS
    return Tables(
        keys=compiled_zeros(contexts, "u8"),
        stamps=compiled_zeros(contexts, "i8"),
        followers=compiled_zeros(contexts * M, "i8"),
        logits_keys=compiled_zeros(logits, "u8"),
        logits_stamps=compiled_zeros(logits, "i8"),
        logits_positions=compiled_zeros(logits, "i8"),
        logits_tokens=compiled_zeros(logits * num_logits, "i4"),
        logits_values=compiled_zeros(logits * num_logits, "f4"),
        weights=compiled_array(weights.copy()),
        squares=compiled_array(squares.copy()),
        clock=compiled_zeros(2, "i8"),
    )


def _power_below(count: int) -> int:
    return 1 << max(count.bit_length() - 1, 2)


def new_context(longest: int = MAX_CONTEXT) -> Context:
    """Allocate room for a context: the last tokens of a text, and hashes of at most MAX_CONTEXT of them."""
    return Context(compiled_zeros(longest, "i8"), compiled_zeros(MAX_CONTEXT + 1, "u8"))


# Entries and their keys.


@jit
def bucket(keys, key):
    """The first entry of the bucket that a key belongs to."""
    return (I64(key >> S11) & (len(keys) // WAYS - 1)) * WAYS


@jit
def find(keys, key):
    """The entry of a key, or -1."""
    first, found = bucket(keys, key), -1
    for entry in range(first, first + WAYS):  # to the end: no branch for the processor to guess
        found = entry if keys[entry] == key else found
    return found if key != 0 else -1


@jit
def claim(keys, stamps, key, now):
    """The entry of a key, or else the oldest of its bucket, now the key's; and whether the key had it before."""
    first = oldest = bucket(keys, key)
    for entry in range(first, first + WAYS):
        if keys[entry] == key:
            stamps[entry] = now
            return entry, True
        if stamps[entry] < stamps[oldest]:
            oldest = entry
    keys[oldest], stamps[oldest] = key, now
    return oldest, False


@jit
def context_key(hashed, kind, extra):
    """The key of a context for one kind of memory; never 0."""
    return mix((hashed + U64(kind) * GOLDEN + U64(extra) * MIX_1) & MASK) | ONE


@jit
def logits_key(context, order, position):
    """The key of logits behind the newest `order` tokens; behind none of them, of the position alone."""
    return context_key(context.hashes[order], LOGITS, 0 if order else position)


@jit
def text_position(tables, position):
    """A position of this very text, which a later text of the session does not share."""
    return position + (tables.clock[1] << 32)


@jit
def fill_context(context, text, start, end):
    """Fill the context with the text from `start` up to `end`; returns how many tokens fitted."""
    known = min(end - start, len(context.tokens))
    for back in range(known):
        context.tokens[back] = text[end - 1 - back]
    return known


@jit
def hash_context(context, known):
    """Hash the newest 1, 2, ... `known` tokens, MAX_CONTEXT at most."""
    value = context.hashes[0] = GOLDEN
    for order in range(1, min(known, MAX_CONTEXT) + 1):
        value = mix((value + U64(context.tokens[order - 1] + 1) * GOLDEN) & MASK)
        context.hashes[order] = value


# Updates.


@jit
def add_follower(tables, key, token):
    """Make a token the newest follower of a context."""
    entry, found = claim(tables.keys, tables.stamps, key, tables.clock[0])
    base = entry * M
    if not found:
        for rank in range(M):
            tables.followers[base + rank] = 0
    rank = 0
    while rank < M - 1 and tables.followers[base + rank] >> 32 != token + 1 and tables.followers[base + rank] != 0:
        rank += 1
    before = tables.followers[base + rank]
    while rank > 0:
        tables.followers[base + rank] = tables.followers[base + rank - 1]
        rank -= 1
    tables.followers[base] = before + 1 if before >> 32 == token + 1 else (token + 1 << 32) + 1


@jit
def add_text(tables, context, text, start, length):
    """Remember what followed every context of the text, for the tokens from `start` up to `length`."""
    for end in range(max(start, 1), length):
        known = fill_context(context, text, 0, end)
        hash_context(context, known)
        for index in range(len(ORDERS)):
            if ORDERS[index] <= known:
                add_follower(tables, context_key(context.hashes[ORDERS[index]], TEXT, 0), text[end])


@jit
def add_ngrams(tables, context, ngrams, length):
    """Remember what followed one and two tokens within the window's n-grams of `length` tokens."""
    for first in range(0, len(ngrams), length):
        for end in range(first + 1, first + length):
            known = fill_context(context, ngrams, max(first, end - MAX_GUESS_ORDER), end)
            hash_context(context, known)
            for order in range(1, known + 1):
                add_follower(tables, context_key(context.hashes[order], WINDOW, 0), ngrams[end])


@jit
def fill_context_of_node(context, tokens, parents, node, text, end, longest):
    """Fill the context with the tokens up to a node of a tree behind the text; returns how many.

    Node 0 is the newest token of the text, which ends at `end`.
    """
    known = 0
    while node > 0 and known < longest:
        context.tokens[known] = tokens[node]
        node = parents[node]
        known += 1
    while known < longest and end > 0:
        end -= 1
        context.tokens[known] = text[end]
        known += 1
    return known


@jit
def add_samples(tables, context, text, end, samples, sources):
    """Remember of every sampled node its token as a guess for its position, and its logits behind its last tokens."""
    width = len(tables.logits_tokens) // len(tables.logits_keys)
    for node in range(len(samples.tokens)):
        if samples.sampled[node] == INVALID_TOKEN:
            continue
        position = text_position(tables, samples.positions[node] + 1)
        known = fill_context_of_node(context, samples.tokens, samples.parents, node, text, end, MAX_LOGITS_ORDER)
        hash_context(context, known)
        if sources >> GUESS & 1:
            for order in range(min(known, MAX_GUESS_ORDER) + 1):
                add_follower(tables, context_key(context.hashes[order], GUESS, position), samples.sampled[node])
        if sources >> LOGITS & 1:
            for order in range(known + 1):
                key = logits_key(context, order, position)
                entry, _ = claim(tables.logits_keys, tables.logits_stamps, key, tables.clock[0])
                tables.logits_positions[entry] = position
                for k in range(width):
                    at = 2 * (samples.starts[node] + k)
                    tables.logits_tokens[entry * width + k] = samples.top_tokens[at + TOKEN]
                    tables.logits_values[entry * width + k] = samples.top_logits[at + LOGIT]
