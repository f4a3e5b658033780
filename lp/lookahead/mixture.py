"""The mixture behind the pool: which tokens may follow a context, each with a chance that is learned online.

Sources vote for tokens; a vote is a feature (source, order of the context, rank of the token there, confidence), and
a token's score is the sum of its features' weights. softmax over the tokens voted for, and over "none of them", is
their chance; every token that turns out true moves the weights along the gradient of its log chance (a maximum-entropy
model; online, by Adagrad). The tree grows by the row most likely to be accepted.

All arithmetic is of integers and of + - * / on doubles in a fixed order, logarithm and exponential included: ranks on
unlike processors compute the same bits.

K: harvested tokens of a row; M: followers remembered of a context.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from lp.lookahead.compiled import I64, U64, jit

MASK, GOLDEN = U64((1 << 64) - 1), U64(0x9E3779B97F4A7C15)
MIX_1, MIX_2, ONE = U64(0xBF58476D1CE4E5B9), U64(0x94D049BB133111EB), U64(1)
S11, S27, S30, S31 = U64(11), U64(27), U64(30), U64(31)

M, WAYS, DEEPEST, VOTED = 4, 4, 8, 32  # followers; ways of a table; longest context; tokens voted for at a node
ORDERS = (1, 2, 3, 4, 6, 8)  # of text contexts
THRESHOLDS = (0.25, 0.75, 1.5, 3.0, 5.0)  # of a gap in logits
GAPS = len(THRESHOLDS) + 1
TEXT, WINDOW, GUESS, RECYCLED = 1, 2, 3, 4  # sources; bit 1 << source switches one on
# Where the features of each source begin.
TEXT_0 = 0
WINDOW_0 = TEXT_0 + len(ORDERS) * M * 6
GUESS_0 = WINDOW_0 + 2 * M
RECYCLED_0 = GUESS_0 + 3 * M
NONE_0 = RECYCLED_0 + 4 * 2 * 4 * GAPS
FEATURES = NONE_0 + (len(ORDERS) + 1) * 5
ROOT_HALF, LN_2 = math.sqrt(0.5), math.log(2)
RATE, FLOOR = 0.3, 1e-7


class Tables(NamedTuple):
    """What is remembered; flat arrays, whose sizes are powers of two times their width."""

    keys: Any  # uint64 (E,): contexts, tagged by source; 0 is empty
    stamps: Any  # int64 (E,): when a context was last written
    followers: Any  # int32 (E * M,): token + 1, the newest first; 0 is empty
    counts: Any  # int32 (E * M,)
    recycled_keys: Any  # uint64 (F,)
    recycled_stamps: Any  # int64 (F,)
    recycled_at: Any  # int64 (F,): position that the logits were for
    recycled_tokens: Any  # int32 (F * K,)
    recycled_logits: Any  # float32 (F * K,)
    weights: Any  # float64 (FEATURES,)
    squares: Any  # float64 (FEATURES,): of the gradients seen
    clock: Any  # int64 (1,)


class Scratch(NamedTuple):
    """Room for one prediction and for the tree."""

    history: Any  # int64 (DEEPEST,): the context, newest token first
    hashes: Any  # uint64 (DEEPEST + 1,): of its last tokens, by how many
    votes: Any  # int64 (2 * most votes,): (token's index, feature)
    tokens: Any  # int64 (VOTED,)
    scores: Any  # float64 (VOTED + 1,): then chances; the last is "none of them"
    noised: Any  # float64 (K,)
    node_tokens: Any  # int64 (nodes,)
    node_parents: Any  # int64 (nodes,)
    node_depths: Any  # int64 (nodes,)
    node_chances: Any  # float64 (nodes,): of being accepted
    node_next: Any  # int64 (nodes,): the voted token to try next
    node_values: Any  # float64 (nodes,): its chance of being accepted
    node_row: Any  # int64 (nodes,): place in row 0, -1 for none
    node_column: Any  # int64 (nodes,): place in column 0, -1 for none
    voted_tokens: Any  # int64 (nodes * VOTED,), likeliest first
    voted_chances: Any  # float64 (nodes * VOTED,)


@jit
def mix(value):  # splitmix64
    value = ((value ^ (value >> S30)) * MIX_1) & MASK
    value = ((value ^ (value >> S27)) * MIX_2) & MASK
    return value ^ (value >> S31)


@jit
def log(value):
    """Natural logarithm, to about 1e-10; only + - * / so that every processor gives the same."""
    mantissa, exponent = math.frexp(value)
    if mantissa < ROOT_HALF:
        mantissa, exponent = mantissa * 2, exponent - 1
    s = (mantissa - 1) / (mantissa + 1)
    z = s * s
    return 2 * s * (1 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z / 11))))) + exponent * LN_2


@jit
def exp(value):
    """Exponential, to about 1e-9."""
    if value < -700.0:
        return 0.0
    power = math.floor(value / LN_2 + 0.5)
    r = value - power * LN_2
    series = 1 + r * (1 + r / 2 * (1 + r / 3 * (1 + r / 4 * (1 + r / 5 * (1 + r / 6 * (1 + r / 7 * (1 + r / 8)))))))
    return math.ldexp(series, I64(power))


@jit
def gumbel(key, token):
    """The noise that lp.lookahead.noise gives this token at the key's position."""
    bits = mix((U64(token + 1) * GOLDEN + key) & MASK)
    return -log(-log((float(bits >> S11) + 0.5) * 2.0**-53))


@jit
def find(keys, key):
    """Where a context is, or -1."""
    first = I64(key >> S11) & (len(keys) // WAYS - 1)
    for place in range(first * WAYS, first * WAYS + WAYS):
        if keys[place] == key:
            return place
    return -1


@jit
def claim(keys, stamps, key, now):
    """Where a context is, or the oldest place that it may take, and whether it was there."""
    first = I64(key >> S11) & (len(keys) // WAYS - 1)
    oldest = first * WAYS
    for place in range(first * WAYS, first * WAYS + WAYS):
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
def hash_history(s, known):
    """Hashes of the newest 1, 2, ... `known` tokens of the context."""
    value = s.hashes[0] = GOLDEN
    for order in range(1, known + 1):
        value = mix((value + U64(s.history[order - 1] + 1) * GOLDEN) & MASK)
        s.hashes[order] = value


@jit
def remember(t, key, token):
    """Make a token the newest follower of a context."""
    entry, there = claim(t.keys, t.stamps, key, t.clock[0])
    base = entry * M
    if not there:
        for rank in range(M):
            t.followers[base + rank] = t.counts[base + rank] = 0
    rank = 0
    while rank < M - 1 and t.followers[base + rank] != token + 1 and t.followers[base + rank] != 0:
        rank += 1
    count = t.counts[base + rank] + 1 if t.followers[base + rank] == token + 1 else 1
    while rank > 0:
        t.followers[base + rank] = t.followers[base + rank - 1]
        t.counts[base + rank] = t.counts[base + rank - 1]
        rank -= 1
    t.followers[base], t.counts[base] = token + 1, count


@jit
def vote(t, s, voted, votes, token, feature):
    """Count a vote; returns how many tokens and votes there are."""
    index = 0
    while index < voted and s.tokens[index] != token:
        index += 1
    if index == VOTED:
        return voted, votes
    if index == voted:
        s.tokens[index], s.scores[index] = token, 0.0
        voted += 1
    s.scores[index] += t.weights[feature]
    s.votes[2 * votes], s.votes[2 * votes + 1] = index, feature
    return voted, votes + 1


@jit
def vote_followers(t, s, voted, votes, key, feature):
    """Votes of a context's followers by rank alone."""
    entry = find(t.keys, key)
    if entry >= 0:
        for rank in range(M):
            if t.followers[entry * M + rank] == 0:
                break
            voted, votes = vote(t, s, voted, votes, t.followers[entry * M + rank] - 1, feature + rank)
    return voted, votes


@jit
def vote_text(t, s, known, voted, votes):
    """Votes of the text's n-grams, by order, rank, count, and whether the context had one follower only."""
    matched = 0
    for index in range(len(ORDERS)):
        order = ORDERS[index]
        entry = find(t.keys, tagged(s.hashes[order], TEXT, 0)) if order <= known else -1
        if entry < 0:
            break  # a longer context is no more known than a shorter one
        matched, base = index + 1, entry * M
        single = 1 if t.followers[base + 1] == 0 else 0
        for rank in range(M):
            if t.followers[base + rank] == 0:
                break
            count = min(t.counts[base + rank], 3) - 1
            feature = TEXT_0 + ((index * M + rank) * 3 + count) * 2 + single
            voted, votes = vote(t, s, voted, votes, t.followers[base + rank] - 1, feature)
    return matched, voted, votes


@jit
def recycled_key(s, order, position):
    """The newest `order` tokens of the context; none of them stands for the position alone."""
    return tagged(s.hashes[order], RECYCLED, 0 if order else position)


@jit
def gap_bucket(gap):
    bucket = 0
    while bucket < GAPS - 1 and gap >= THRESHOLDS[bucket]:
        bucket += 1
    return bucket


@jit
def vote_recycled(t, s, known, position, key, noisy, voted, votes):
    """Votes of the logits last seen behind the longest known context, under the noise of this position."""
    width = len(s.noised)
    for order in range(min(known, 3), -1, -1):
        entry = find(t.recycled_keys, recycled_key(s, order, position))
        if entry < 0:
            continue
        base, first, second, third = entry * width, -math.inf, -math.inf, -math.inf
        for k in range(width):
            score = t.recycled_logits[base + k] * 1.0
            if noisy and score > -1e30:
                score += gumbel(key, t.recycled_tokens[base + k])
            s.noised[k] = score
            if score > first:
                first, second, third = score, first, second
            elif score > second:
                second, third = score, second
            elif score > third:
                third = score
        here = 1 if t.recycled_at[entry] == position else 0
        group = RECYCLED_0 + (order * 2 + here) * 4 * GAPS
        for k in range(width):
            score = s.noised[k]
            if first - score > 10.0:
                continue
            rank = 0 if score >= first else 1 if score >= second else 2 if score >= third else 3
            gap = first - second if rank == 0 else first - score
            voted, votes = vote(t, s, voted, votes, t.recycled_tokens[base + k], group + rank * GAPS + gap_bucket(gap))
        return order, voted, votes
    return -1, voted, votes


@jit
def predict(t, s, known, position, base_key, noisy, sources):
    """Votes and chances of the tokens for `position`, whose context of `known` tokens is in the history.

    Returns:
        How many tokens were voted for, and how many votes they had.
    """
    hash_history(s, known)
    key = mix((base_key + U64(position) * GOLDEN + GOLDEN) & MASK)
    voted, votes, matched, order = 0, 0, 0, -1
    if sources >> RECYCLED & 1:
        order, voted, votes = vote_recycled(t, s, known, position, key, noisy, voted, votes)
    if sources >> TEXT & 1:
        matched, voted, votes = vote_text(t, s, known, voted, votes)
    for length in range(min(known, 2) + 1):
        if sources >> WINDOW & 1 and length:
            place = tagged(s.hashes[length], WINDOW, 0)
            voted, votes = vote_followers(t, s, voted, votes, place, WINDOW_0 + (length - 1) * M)
        if sources >> GUESS & 1:
            place = tagged(s.hashes[length], GUESS, position)
            voted, votes = vote_followers(t, s, voted, votes, place, GUESS_0 + length * M)
    none = NONE_0 + matched * 5 + order + 1
    s.votes[2 * votes], s.votes[2 * votes + 1] = voted, none
    s.scores[voted] = t.weights[none]
    top, total = -math.inf, 0.0
    for index in range(voted + 1):
        top = max(top, s.scores[index])
    for index in range(voted + 1):
        s.scores[index] = exp(s.scores[index] - top)
        total += s.scores[index]
    for index in range(voted + 1):
        s.scores[index] /= total
    return voted, votes + 1


@jit
def learn(t, s, voted, votes, truth):
    """Move the weights along the gradient of the log chance of what turned out true."""
    right = 0
    while right < voted and s.tokens[right] != truth:
        right += 1
    for vote_index in range(votes):
        index, feature = s.votes[2 * vote_index], s.votes[2 * vote_index + 1]
        gradient = (1.0 if index == right else 0.0) - s.scores[index]
        t.squares[feature] += gradient * gradient
        t.weights[feature] += RATE * gradient / math.sqrt(t.squares[feature])
