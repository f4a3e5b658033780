"""The pool's memory: two hash tables of fixed size, one with the followers of contexts, one with top-k logits.

A context is the newest tokens of a text, up to some place; its order is their number. A follower is a token that came
behind a context. Kinds of memory share the tables: n-grams of the text, n-grams of the window, guesses (tokens that
were sampled for a position), and top-k logits. The key of an entry is a hash of its context and kind. It selects a
bucket of WAYS entries; if the bucket is full, the entry written longest ago is replaced.

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
ORDERS = (1, 2, 3, 4, 6, 8)  # orders of the contexts of text n-grams
MAX_GUESS_ORDER = 2  # tokens of the longest context of a guess, and of a window n-gram
MAX_LOGITS_ORDER = 3  # tokens of the longest context of logits
TEXT, WINDOW, GUESS, LOGITS = 1, 2, 3, 4  # kinds of memory; bit 1 << kind of `sources` switches a kind on
MODEL = 5  # the kind of model n-grams, which have a table of their own


class Tables(NamedTuple):
    """The memory of one pool, or of one owner's session: both hash tables and the weights of the mixture.

    All are flat arrays for compiled functions; E and F are powers of two.
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
    """The tokens of a context with the hashes of all its orders, in arrays that are used again for each look-up."""

    tokens: Any  # int64 (MAX_CONTEXT,), longer if there are corpora: the newest first
    hashes: Any  # uint64 (MAX_CONTEXT + 1,): hashes of the newest 0, 1, 2, ... tokens


class Samples(NamedTuple):
    """The samples and top-k logits of a step's nodes, as compiled functions take them; see StepSamples."""

    tokens: Any  # int64 (nodes,), like the next four
    parents: Any
    positions: Any
    sampled: Any
    starts: Any
    top_tokens: Any  # int32: packed logits; a node's k-th token is at 2 * (starts[node] + k) + TOKEN
    top_logits: Any  # float32: the same memory; its logit is at 2 * (starts[node] + k) + LOGIT


def new_tables(num_logits: int, mebibytes: int, weights: np.ndarray, squares: np.ndarray) -> Tables:
    """Make empty tables.

    Args:
        num_logits: K, logits of an entry; 0: no logits are remembered.
        mebibytes: most memory of all arrays, MiB.
        weights: float64 (FEATURES,), the mixture's weights to begin with.
        squares: float64 (FEATURES,), sums of their squared gradients to begin with; larger ones slow learning down.
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
    """Allocate a context of at most `longest` tokens; no more than MAX_CONTEXT of them are hashed."""
    return Context(compiled_zeros(longest, "i8"), compiled_zeros(MAX_CONTEXT + 1, "u8"))


# Entries and their keys.


@jit
def bucket(keys, key):
    """Index of the first of the WAYS entries (a bucket) in which `key` is stored if it is in the table at all."""
    return (I64(key >> S11) & (len(keys) // WAYS - 1)) * WAYS


@jit
def find(keys, key):
    """Look up a key in a table's array of keys: index of its entry; -1 if there is none, or the key is 0."""
    first, found = bucket(keys, key), -1
    for entry in range(first, first + WAYS):  # to the end: no branch for the processor to guess
        found = entry if keys[entry] == key else found
    return found if key != 0 else -1


@jit
def claim(keys, stamps, key, now):
    """Find the entry of a key, or give it the entry of its bucket that was written longest ago, to be written now.

    Args:
        keys, stamps: the arrays of one table.
        key: uint64, not 0.
        now: the new stamp of the entry.

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
    """Make the key of an entry; never 0.

    Args:
        hashed: uint64, hash of the context's tokens, see `hash_context`.
        kind: kind of memory: TEXT, WINDOW, GUESS, LOGITS or MODEL.
        extra: the position, for a guess or for logits of a position alone; else 0.
    """
    return mix((hashed + U64(kind) * GOLDEN + U64(extra) * MIX_1) & MASK) | ONE


@jit
def logits_key(context, order, position):
    """Key of the top-k logits behind a context's newest `order` tokens; with order 0, of those for the position."""
    return context_key(context.hashes[order], LOGITS, 0 if order else position)


@jit
def text_position(tables, position):
    """Make a position unique in a session, by the text's number: later texts must not find guesses for this one."""
    return position + (tables.clock[1] << 32)


@jit
def fill_context(context, text, start, end):
    """Fill a context with the tokens of a text from index `start` up to `end`, the newest first.

    Returns:
        Number of tokens filled in: the newest, as many as fit.
    """
    known = min(end - start, len(context.tokens))
    for back in range(known):
        context.tokens[back] = text[end - 1 - back]
    return known


@jit
def hash_context(context, known):
    """Fill in a context's hashes of its newest 1, 2, ... tokens, up to `known` or MAX_CONTEXT of them."""
    value = context.hashes[0] = GOLDEN
    for order in range(1, min(known, MAX_CONTEXT) + 1):
        value = mix((value + U64(context.tokens[order - 1] + 1) * GOLDEN) & MASK)
        context.hashes[order] = value


# Updates.


@jit
def add_follower(tables, key, token):
    """Remember that a token followed a context: it becomes the first of the entry's M followers, and is counted.

    Args:
        tables: Tables.
        key: key of the context, see `context_key`.
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
    """Remember the n-grams that a text's new tokens end.

    Args:
        tables: Tables.
        context: Context, overwritten.
        text: int64, token ids.
        start: index of the first new token.
        length: length of the text.
    """
    for end in range(max(start, 1), length):
        known = fill_context(context, text, 0, end)
        hash_context(context, known)
        for index in range(len(ORDERS)):
            if ORDERS[index] <= known:
                add_follower(tables, context_key(context.hashes[ORDERS[index]], TEXT, 0), text[end])


@jit
def add_ngrams(tables, context, ngrams, length):
    """Remember the window's n-grams, as contexts of one and two tokens with the token that follows.

    Args:
        tables: Tables.
        context: Context, overwritten.
        ngrams: int64, all n-grams in one array.
        length: N, tokens of an n-gram.
    """
    for first in range(0, len(ngrams), length):
        for end in range(first + 1, first + length):
            known = fill_context(context, ngrams, max(first, end - MAX_GUESS_ORDER), end)
            hash_context(context, known)
            for order in range(1, known + 1):
                add_follower(tables, context_key(context.hashes[order], WINDOW, 0), ngrams[end])


@jit
def fill_context_of_node(context, tokens, parents, node, text, end, longest):
    """Fill a context with the tokens up to a node of a draft tree: the node, its ancestors, then the text's tokens.

    Args:
        context: Context, whose tokens are overwritten, the newest first.
        tokens, parents: int64 (nodes,), token and parent of every node; node 0 is the newest token of the text.
        node: index of the node.
        text: int64, token ids.
        end: length of the text, node 0 included.
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
    """Remember a step's samples: at every node the sampled token as a guess for its position, and the top-k logits.

    Args:
        tables: Tables.
        context: Context, overwritten.
        text: int64, token ids.
        end: length of the text before the step; its last token is node 0.
        samples: Samples.
        sources: bit 1 << kind for each kind of memory that is switched on, GUESS and LOGITS.
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
