"""The mixture behind the pool: which tokens may follow a context, each with a chance that is learned online.

Sources vote for tokens; a vote is a feature (source, order of the context, rank of the token there, confidence), and
a token's score is the sum of its features' weights. softmax over the tokens voted for, and over "none of them", is
their chance; every token that turns out true moves the weights along the gradient of its log chance (a maximum-entropy
model; online, by Adagrad). The tree grows by the row most likely to be accepted.

All arithmetic is of integers and of + - * / on doubles in a fixed order, logarithm and exponential included: ranks on
unlike processors compute the same bits.

K: kept tokens of a row; M: followers remembered of a context.
"""

from __future__ import annotations

import math

from lp.compiled import U64, exp, jit, log
from lp.draft.pool.tables import (
    DEEPEST,
    GOLDEN,
    GUESSES,
    MASK,
    ORDERS,
    ROWS,
    S11,
    VOTED,
    WINDOWS,
    M,
    hash_history,
    look_up,
    mix,
    placed,
    recall_text,
)
from lp.sampling.noise import BELOW_1

THRESHOLDS = (0.25, 0.75, 1.5, 3.0, 5.0)  # of a gap in logits
GAPS = len(THRESHOLDS) + 1
# Where the features of each source begin.
TEXT_0 = 0
WINDOW_0 = TEXT_0 + len(ORDERS) * M * 6
GUESS_0 = WINDOW_0 + 2 * M
RECYCLED_0 = GUESS_0 + 3 * M
NONE_0 = RECYCLED_0 + 4 * 2 * 4 * GAPS
FEATURES = NONE_0 + (len(ORDERS) + 1) * 5
RATE, FLOOR = 0.3, 1e-7  # of learning; the least chance worth a row
FAR = 10.0  # logits behind the best that are not voted for


@jit
def uniform(bits):
    """As lp.sampling.noise has it: never 1, however many bits are set."""
    return min((float(bits >> S11) + 0.5) * 2.0**-53, BELOW_1)


@jit
def gumbel(key, token):
    """The noise that lp.sampling.noise gives this token at the key's position."""
    bits = mix((U64(token + 1) * GOLDEN + key) & MASK)
    return -log(-log(uniform(bits)))


@jit
def vote(t, s, voted, votes, token, feature):
    """Count a vote; returns how many tokens and votes there are."""
    index = voted
    for place in range(voted):  # to the end: no branch for the processor to guess
        index = place if s.tokens[place] == token else index
    if index == VOTED:
        return voted, votes
    if index == voted:
        s.tokens[index], s.scores[index] = token, 0.0
        voted += 1
    s.scores[index] += t.weights[feature]
    s.votes[2 * votes], s.votes[2 * votes + 1] = index, feature
    return voted, votes + 1


@jit
def vote_followers(t, s, voted, votes, entry, feature):
    """Votes of a context's followers by rank alone."""
    if entry >= 0:
        for rank in range(M):
            if t.followers[entry * M + rank] == 0:
                break
            voted, votes = vote(t, s, voted, votes, (t.followers[entry * M + rank] >> 32) - 1, feature + rank)
    return voted, votes


@jit
def vote_text(t, s, voted, votes):
    """Votes of the text's n-grams, by order, rank, count, and whether the context had one follower only."""
    matched = 0
    for index in range(len(ORDERS)):
        entry = s.entries[index]
        if entry < 0:
            break  # a longer context is no more known than a shorter one
        matched, base = index + 1, entry * M
        single = 1 if t.followers[base + 1] == 0 else 0
        for rank in range(M):
            if t.followers[base + rank] == 0:
                break
            count = min(t.followers[base + rank] & 0xFFFFFFFF, 3) - 1
            feature = TEXT_0 + ((index * M + rank) * 3 + count) * 2 + single
            voted, votes = vote(t, s, voted, votes, (t.followers[base + rank] >> 32) - 1, feature)
    return matched, voted, votes


@jit
def gap_bucket(gap):
    bucket = 0
    while bucket < GAPS - 1 and gap >= THRESHOLDS[bucket]:
        bucket += 1
    return bucket


@jit
def vote_recycled(t, s, place, key, noisy, voted, votes):
    """Votes of the logits last seen behind the longest known context, under the noise of this place."""
    width = len(s.noised)
    for order in range(3, -1, -1):
        entry = s.entries[ROWS + order]
        if entry < 0:
            continue
        base, first, second, third = entry * width, -math.inf, -math.inf, -math.inf
        for k in range(width):
            score = t.recycled_logits[base + k] * 1.0
            if noisy and score > first - 2 * FAR:  # noise above FAR is once in e^FAR times
                score += gumbel(key, t.recycled_tokens[base + k])
            s.noised[k] = score
            if score > first:
                first, second, third = score, first, second
            elif score > second:
                second, third = score, second
            elif score > third:
                third = score
        here = 1 if t.recycled_at[entry] == place else 0
        group = RECYCLED_0 + (order * 2 + here) * 4 * GAPS
        for k in range(width):
            score = s.noised[k]
            if first - score > FAR:
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
    here = placed(t, position)
    look_up(t, s, known, here, sources)
    order, voted, votes = vote_recycled(t, s, here, key, noisy, 0, 0)
    matched, voted, votes = vote_text(t, s, voted, votes)
    for length in range(3):
        if length:
            entry, feature = s.entries[WINDOWS + length], WINDOW_0 + (length - 1) * M
            voted, votes = vote_followers(t, s, voted, votes, entry, feature)
        voted, votes = vote_followers(t, s, voted, votes, s.entries[GUESSES + length], GUESS_0 + length * M)
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


@jit
def study(t, s, text, start, base_key, noisy, sources):
    """Learn the weights from the tokens from `start` on."""
    for end in range(start, len(text)):
        known = recall_text(s, text, 0, end)
        voted, votes = predict(t, s, known, end, base_key, noisy, sources)
        learn(t, s, voted, votes, text[end])


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
def expand(t, s, node, tail, n_tail, position, base_key, noisy, sources, truth, risk):
    """Predict what follows a node."""
    known = recall(s, node, tail, n_tail)
    voted, _ = predict(t, s, known, position + s.node_depths[node] + 1, base_key, noisy, sources)
    base, depth = node * VOTED, s.node_depths[node]
    believed = truth * (1 + risk * depth) / (1 + risk * (depth + 1))
    for index in range(voted):
        s.voted_tokens[base + index], s.voted_chances[base + index] = s.tokens[index], s.scores[index] * believed
    s.node_voted[node] = voted
    choose(s, node)


@jit
def choose(s, node):
    """Find the likeliest token behind a node that is not in the tree yet; of equals, the one voted for first."""
    base = node * VOTED
    best, chance = base, 0.0
    for choice in range(base, base + s.node_voted[node]):
        if s.voted_chances[choice] > chance:
            best, chance = choice, s.voted_chances[choice]
    s.node_next[node], s.node_values[node] = best, s.node_chances[node] * chance


@jit
def grow(t, s, tail, n_tail, position, base_key, noisy, sources, budget, deepest, row, column, price):
    """Grow the tree behind `c`, always by the token most likely to be accepted; returns its nodes, the root included.

    Nodes that repeat row 0 or column 0 of the window cost no row. The tree is cut where its chances less its price
    add up to most, and ends where no larger one could pay.
    """
    rate, base, seconds, slopes, lesson, lessons, truth, risk = price
    worth = best = -rate * seconds[base]
    kept = 1
    s.node_tokens[0] = tail[0]
    s.node_parents[0], s.node_depths[0], s.node_chances[0], s.node_row[0], s.node_column[0] = -1, 0, 1.0, 0, 0
    nodes, rows = 1, 0
    expand(t, s, 0, tail, n_tail, position, base_key, noisy, sources, truth, risk)
    while nodes < len(s.node_tokens):
        parent = 0
        for node in range(1, nodes):
            if s.node_values[node] > s.node_values[parent]:
                parent = node
        if s.node_values[parent] < FLOOR:
            break
        choice = s.node_next[parent]
        token, place = s.voted_tokens[choice], s.node_row[parent]
        in_row = place + 1 if 0 <= place < len(row) - 1 and row[place + 1] == token else -1
        place = s.node_column[parent]
        in_column = place + 1 if 0 <= place < len(column) - 1 and column[place + 1] == token else -1
        if in_row < 0 and in_column < 0:
            taught = lesson if rows < lessons else 0.0
            if rows == budget or s.node_values[parent] + taught <= rate * slopes[base + rows]:
                break
            worth += taught - rate * (seconds[base + rows + 1] - seconds[base + rows])
            rows += 1
        s.node_tokens[nodes], s.node_parents[nodes] = token, parent
        s.node_depths[nodes], s.node_values[nodes] = s.node_depths[parent] + 1, 0.0
        s.node_chances[nodes] = s.node_values[parent]
        s.node_row[nodes], s.node_column[nodes] = in_row, in_column
        s.voted_chances[choice] = 0.0
        choose(s, parent)
        if s.node_depths[nodes] < deepest:
            expand(t, s, nodes, tail, n_tail, position, base_key, noisy, sources, truth, risk)
        worth += s.node_chances[nodes]
        nodes += 1
        if worth > best:
            best, kept = worth, nodes
    return kept
