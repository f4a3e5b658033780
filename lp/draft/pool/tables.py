"""The pool's memory: two hash tables of fixed size, one with the followers of contexts, one with top-k logits.

A context is the newest tokens of a text, up to some place; its order is their number. A follower is a token that came
after a context. Several kinds of memory share the tables: n-grams of the text, n-grams of the lookahead window, guesses
(tokens that were sampled for a position), and top-k logits. The key of an entry is a hash of its context and kind. The
key selects a bucket of WAYS entries; if the bucket is full, the entry that was written longest ago is replaced.

All arithmetic of compiled functions is of integers, and of + - * / on doubles in a fixed order, logarithm and
exponential included. So ranks on different processors compute the same bits.

E: number of entries in the table of followers; F: number of entries in the table of logits; K: `num_logits`, number of
logits in an entry; M: number of followers that are stored for a context.
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
ORDERS = (1, 2, 3, 4, 6, 8)  # orders of the contexts of text n-grams
MAX_GUESS_ORDER = 2  # tokens of the longest context of a guess, and of a window n-gram
MAX_LOGITS_ORDER = 3  # tokens of the longest context of logits
TEXT, WINDOW, GUESS, LOGITS = 1, 2, 3, 4  # kinds of memory; bit 1 << kind of `sources` switches a kind on
MODEL = 5  # the kind of model n-grams, which have a table of their own


class Tables(NamedTuple):
    """Memory of one n-gram pool, or of one owner's session: two hash tables, and the weights that predict tokens.

    All fields are flat arrays for functions compiled by numba. E, the number of entries in the table of followers, and
    F, the number of entries in the table of logits, are powers of two.
    """

    keys: Any  # uint64 (E,): key of each entry; 0 is empty
    stamps: Any  # int64 (E,): value of `clock[0]` when the entry was last written
    followers: Any  # int64 (E * M,): (token + 1) << 32 | how often it came, the newest first; 0 is empty
    logits_keys: Any  # uint64 (F,): like `keys`
    logits_stamps: Any  # int64 (F,): like `stamps`
    logits_positions: Any  # int64 (F,): `text_position` of the token that the logits predict
    logits_tokens: Any  # int32 (F * K,): tokens of the K largest logits
    logits_values: Any  # float32 (F * K,): these logits
    weights: Any  # float64 (FEATURES,): weights of the mixture
    squares: Any  # float64 (FEATURES,): sums of their squared gradients
    clock: Any  # int64 (2,): number of steps, and of texts, so far


class Context(NamedTuple):
    """Newest tokens of a text, with hashes of the newest 1, 2, ... tokens; its arrays are reused for each look-up."""

    tokens: Any  # int64 (MAX_CONTEXT,), longer if there are corpora: the newest first
    hashes: Any  # uint64 (MAX_CONTEXT + 1,): hashes of the newest 0, 1, 2, ... tokens


class Samples(NamedTuple):
    """Sampled tokens and top-k logits at the nodes of a step, as arrays for functions compiled by numba.

    `lp.draft.source.StepSamples` describes the fields.
    """

    tokens: Any  # int64 (nodes,), like the next four
    parents: Any
    positions: Any
    sampled: Any
    starts: Any
    top_tokens: Any  # int32: packed logits; a node's k-th token is at 2 * (starts[node] + k) + TOKEN
    top_logits: Any  # float32: the same memory; its logit is at 2 * (starts[node] + k) + LOGIT


def new_tables(num_logits: int, mebibytes: int, weights: np.ndarray, squares: np.ndarray) -> Tables:
    """Make empty tables, the memory of an n-gram pool.

    Args:
        num_logits: K, number of top-k logits to store for a context; 0: no logits are remembered.
        mebibytes: memory limit for all arrays together, in MiB.
        weights: float64 (FEATURES,), initial weights of the mixture that predicts tokens.
        squares: float64 (FEATURES,), initial sums of squared gradients for Adagrad; larger values make learning slower.
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
    """Allocate a context: room for up to `longest` newest tokens of a text, and for MAX_CONTEXT hashes."""
    return Context(compiled_zeros(longest, "i8"), compiled_zeros(MAX_CONTEXT + 1, "u8"))


# Entries and their keys.


@jit
def bucket(keys, key):
    """Index of the first entry in the bucket of a key.

    A bucket is WAYS successive entries of a table: the only entries that may hold the key.

    Args:
        keys: uint64, keys of all entries of a table.
        key: uint64, the key.
    """
    return (I64(key >> S11) & (len(keys) // WAYS - 1)) * WAYS


@jit
def find(keys, key):
    """Find the entry with a given key; returns its index, or -1 if the table has no such entry or the key is 0.

    Args:
        keys: uint64, keys of all entries of a table.
        key: uint64, the key.
    """
    first, found = bucket(keys, key), -1
    for entry in range(first, first + WAYS):  # to the end: no branch for the processor to guess
        found = entry if keys[entry] == key else found
    return found if key != 0 else -1


@jit
def claim(keys, stamps, key, now):
    """Find the entry with a given key to write to it; if there is none, take over the oldest entry of the key's bucket.

    The oldest entry is the one that was written longest ago.

    Args:
        keys, stamps: arrays of one table: the key of each entry, and the time when it was last written.
        key: uint64, not 0.
        now: present time, counted in steps; it becomes the stamp of the entry.

    Returns:
        Index of the entry, and whether it had this key before; if not, its old contents have to be cleared.
    """
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
    """Make the key of the table entry for a context and a kind of memory; never 0.

    Args:
        hashed: uint64, hash of the context's tokens, from `hash_context`.
        kind: kind of memory: TEXT, WINDOW, GUESS, LOGITS or MODEL.
        extra: position for a guess, or for logits that are stored by their position alone; else 0.
    """
    return mix((hashed + U64(kind) * GOLDEN + U64(extra) * MIX_1) & MASK) | ONE


@jit
def logits_key(context, order, position):
    """Make the key under which the top-k logits after a context are stored.

    Args:
        context: Context, with its hashes.
        order: number of the context's newest tokens to use; 0: the logits are stored by their position alone.
        position: position of the token that the logits predict, as returned by `text_position`; used for order 0 only.
    """
    return context_key(context.hashes[order], LOGITS, 0 if order else position)


@jit
def text_position(tables, position):
    """Make a position unique in a session, so that later texts do not find the guesses for this text.

    The running number of the text in the session is put into the upper 32 bits.

    Args:
        tables: Tables, which count the texts of the session.
        position: position in the text, from 0.
    """
    return position + (tables.clock[1] << 32)


@jit
def fill_context(context, text, start, end):
    """Fill a context with tokens of a text, from index `start` to `end` - 1, the newest first.

    Args:
        context: Context to fill.
        text: int64, token ids of the text.
        start, end: range of the tokens.

    Returns:
        Number of tokens filled in; if not all fit, the newest are taken.
    """
    known = min(end - start, len(context.tokens))
    for back in range(known):
        context.tokens[back] = text[end - 1 - back]
    return known


@jit
def hash_context(context, known):
    """Compute the hashes of a context's newest 1, 2, ... tokens.

    Args:
        context: Context, whose hashes are overwritten.
        known: number of tokens in the context; at most MAX_CONTEXT are hashed.
    """
    value = context.hashes[0] = GOLDEN
    for order in range(1, min(known, MAX_CONTEXT) + 1):
        value = mix((value + U64(context.tokens[order - 1] + 1) * GOLDEN) & MASK)
        context.hashes[order] = value


# Updates.


@jit
def add_follower(tables, key, token):
    """Remember that a token followed a context: it becomes the first of up to M stored followers, and its count grows.

    Args:
        tables: Tables, the pool's memory.
        key: key of the context, from `context_key`.
        token: token id.
    """
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
    """Remember the n-grams that end with a text's new tokens: which token followed each context, for all ORDERS.

    The context is the tokens before a new token; ORDERS lists the context lengths that are stored.

    Args:
        tables: Tables, the pool's memory.
        context: Context, overwritten.
        text: int64, token ids of the text.
        start: index of the first new token.
        length: number of tokens in the text.
    """
    for end in range(max(start, 1), length):
        known = fill_context(context, text, 0, end)
        hash_context(context, known)
        for index in range(len(ORDERS)):
            if ORDERS[index] <= known:
                add_follower(tables, context_key(context.hashes[ORDERS[index]], TEXT, 0), text[end])


@jit
def add_ngrams(tables, context, ngrams, length):
    """Remember the n-grams of the lookahead window: which tokens followed contexts of one and two tokens in them.

    Args:
        tables: Tables, the pool's memory.
        context: Context, overwritten.
        ngrams: int64, token ids of all n-grams, one n-gram after the other.
        length: N, number of tokens in an n-gram.
    """
    for first in range(0, len(ngrams), length):
        for end in range(first + 1, first + length):
            known = fill_context(context, ngrams, max(first, end - MAX_GUESS_ORDER), end)
            hash_context(context, known)
            for order in range(1, known + 1):
                add_follower(tables, context_key(context.hashes[order], WINDOW, 0), ngrams[end])


@jit
def fill_context_of_node(context, tokens, parents, node, text, end, longest):
    """Fill a context with the tokens up to a node of a draft tree: node, ancestors, then the text's newest tokens.

    Args:
        context: Context, whose tokens are overwritten, the newest first.
        tokens, parents: int64 (nodes,), token id, and index of the parent, of each node; node 0 is the text's newest
            token.
        node: index of the node.
        text: int64, token ids of the text.
        end: number of tokens in the text, including node 0.
        longest: most tokens to fill in.

    Returns:
        Number of tokens filled in.
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
    """Remember a step's samples: at each node the sampled token, as a guess for its position, and the top-k logits.

    Args:
        tables: Tables, the pool's memory.
        context: Context, overwritten.
        text: int64, token ids of the text.
        end: number of tokens in the text before the step; the last of them is node 0.
        samples: Samples, with the step's sampled tokens and logits.
        sources: bit mask of what to remember: 1 << GUESS for sampled tokens, 1 << LOGITS for logits.
    """
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
