"""The pool's predictor: gives probabilities to the tokens that may follow a context, by a model that is trained online.

A context is the newest tokens of a text; its order is their number. There are several kinds of memory: n-grams of the
text, n-grams of the lookahead window, guesses (tokens sampled earlier for a position), top-k logits, model n-grams
(logits measured once for a model), and corpora (indexes of files).

1. Each entry of a memory that matches the context votes for tokens. A vote is a feature: the kind of memory, the order,
   the rank of the token in the entry, and how sure the entry is. One more feature of each token says which kinds of
   memory voted for it.
2. A token's score is the sum of the weights of its features. "None of them" stands for all other tokens and has a
   score, too. A softmax over all scores gives the probabilities.
3. Each new token of the text trains the weights: they move along the gradient of the token's log probability (a
   maximum-entropy model, trained by Adagrad).

All arithmetic is of integers, and of + - * / on doubles in a fixed order, logarithm and exponential included. So ranks
on different processors compute the same bits.

K: `num_logits`, number of logits in an entry; M: number of followers that are stored for a context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lp.compiled import (
    GOLDEN,
    I64,
    MASK,
    ONE,
    U64,
    compiled_array,
    compiled_ints,
    compiled_zeros,
    exp,
    jit,
    jit_called,
    log,
    mix,
)
from lp.config import MAX_CORPORA
from lp.draft.pool.corpus import MAX_MATCH, SAMPLED, SEPARATOR, Corpus, count_followers, find_match
from lp.draft.pool.last_step import LastStep, add_older_guess, logits_of_node, new_last_step, search_step
from lp.draft.pool.model_ngrams import ModelNgrams
from lp.draft.pool.tables import (
    GUESS,
    LOGITS,
    MAX_CONTEXT,
    MAX_GUESS_ORDER,
    MAX_LOGITS_ORDER,
    MODEL,
    ORDERS,
    S11,
    TEXT,
    WINDOW,
    Context,
    M,
    bucket,
    context_key,
    fill_context,
    find,
    hash_context,
    logits_key,
    new_context,
    text_position,
)
from lp.sampling.noise import BELOW_1, sequence_key
from lp.sampling.top_logits import LOGIT, TOKEN

MAX_INDEXES = MAX_CORPORA + 3  # corpora, their delta, a history's two: compiled functions take exactly so many
MAX_CHOICES = 32  # most tokens that get votes after one context
# Numbers of the contexts that are looked up: one for each kind of memory and order. Window n-grams have no order 0,
# so that number is the last of the text's.
TEXT_AT = 0
WINDOW_AT = len(ORDERS) - 1
GUESS_AT = WINDOW_AT + MAX_GUESS_ORDER + 1
LOGITS_AT = GUESS_AT + MAX_GUESS_ORDER + 1
NUM_CONTEXTS = LOGITS_AT + MAX_LOGITS_ORDER + 1
THRESHOLDS = (0.25, 0.75, 1.5, 3.0, 5.0)  # limits between the GAPS classes of the gap between two logits
GAPS = len(THRESHOLDS) + 1
# Where the features of each kind begin.
TEXT_0 = 0
WINDOW_0 = TEXT_0 + len(ORDERS) * M * 6
GUESS_0 = WINDOW_0 + 2 * M
LOGITS_0 = GUESS_0 + 3 * M
NONE_0 = LOGITS_0 + 4 * 2 * 4 * GAPS
MODEL_0 = NONE_0 + (len(ORDERS) + 1) * 5
MODEL_NONE_0 = MODEL_0 + MAX_LOGITS_ORDER * 2 * 4 * GAPS  # features of "none of them", where model n-grams vote
TOGETHER_0 = MODEL_NONE_0 + MAX_LOGITS_ORDER * (MAX_LOGITS_ORDER + 1) * (len(ORDERS) + 1)
# Features of the kinds of memory that voted for a token, by the level of each one's vote (`feature_levels`); level 0 is
# no vote.
CORPUS_KIND, TEXT_KIND, GUESS_KIND, LOGITS_KIND, MODEL_KIND = range(5)
LEVELS = (4, 4, 3, 5, 5)
KINDS = len(LEVELS)
CORPUS_0 = TOGETHER_0 + math.prod(LEVELS)
LENGTHS = (3, 4, 5, 7, 10, 16, 32)  # limits between the classes of a match by its length
ROWS = (2, 4, 10)  # limits between the classes of a match by its number of rows
SHARES = 6  # classes of a follower by its share of the match's rows, see `share_bucket`
CORPUS_NONE_0 = CORPUS_0 + (len(LENGTHS) + 1) * (len(ROWS) + 1) * SHARES  # of "none of them", where a corpus votes
FEATURES = CORPUS_NONE_0 + (len(LENGTHS) + 1) * (len(ROWS) + 1)
# A match in a corpus, as three numbers: index of the corpus, length, place of its row, or -1 if it has several.
MATCH_CORPUS, MATCH_LENGTH, MATCH_PLACE = range(3)
MATCH = 3
NOTHING_KNOWN = (0, MAX_MATCH, -1)  # such a match if nothing is known of the context without its newest token
LEARNING_RATE = 0.3  # learning rate of Adagrad
FAR = 10.0  # logits this far below the best get no vote


def feature_levels() -> np.ndarray:
    """How sure each feature (a kind of vote for a token) is, as a level from 1 to 4.

    By these levels, the predictor sees how surely the kinds of memory agree on a token. The level depends on the kind
    of memory that votes:

    - N-grams of the text: level 1, 2 or 3 for a context of 1 token, of 2 to 3 tokens, or of more.
    - Guesses: 1 if only the position matches, 2 if tokens before it match, too.
    - Top-k logits and model n-grams: 4, 3 and 2 for the three largest logits, 1 for the others.
    - Corpora: 1 if fewer than half of the occurrences are followed by the token, or if the match has 2 or 3 tokens;
      else 2 for a match of 4 to 6 tokens, and 3 for a longer match.

    Returns:
        int64 (FEATURES,), kind of memory + KINDS * level for each feature; 0 for features that have no level.
    """
    found = np.zeros(FEATURES, np.int64)
    of_match, share = np.divmod(np.arange(CORPUS_NONE_0 - CORPUS_0), SHARES)
    length = of_match // (len(ROWS) + 1)
    level = np.where((share < 3) | (length < 2), 1, np.where(length < 4, 2, 3))
    found[CORPUS_0:CORPUS_NONE_0] = CORPUS_KIND + KINDS * level
    for index, order in enumerate(ORDERS):
        begin = TEXT_0 + index * M * 6
        found[begin : begin + M * 6] = TEXT_KIND + KINDS * (1 if order == 1 else 2 if order <= 3 else 3)
    found[GUESS_0:LOGITS_0] = GUESS_KIND + KINDS * 2
    found[GUESS_0 : GUESS_0 + M] = GUESS_KIND + KINDS
    for kind, begin, end in ((LOGITS_KIND, LOGITS_0, NONE_0), (MODEL_KIND, MODEL_0, MODEL_NONE_0)):
        rank = np.arange(end - begin) // GAPS % 4
        found[begin:end] = kind + KINDS * (4 - rank)
    return found


class Predictor(NamedTuple):
    """All that is needed, besides the pool's tables, to predict one text's next tokens; and the newest prediction.

    Its arrays have the form that functions compiled by numba read and fill.
    """

    sources: int  # bit 1 << kind for each kind of memory that votes
    noise_key: Any  # uint64: key of the sampler's noise
    noisy: bool  # whether that noise is added to logits before they vote
    context: Context
    keys: Any  # uint64 (NUM_CONTEXTS,): key of every context that may vote, 0 for one that may not
    entries: Any  # int64 (NUM_CONTEXTS + 1,): their entries in the tables, -1 for none; the last has no meaning
    last_step: LastStep  # samples that are not in the tables yet
    model_ngrams: ModelNgrams  # they vote where they know a longer context than the logits do
    temperature: float  # temperature of the sampler, by which logits of model n-grams are divided
    num_corpora: int  # how many of `corpora` are used
    corpora: Any  # tuple of MAX_INDEXES Corpus; the one with the longest match votes
    match: Any  # int64 (MATCH,): the match of the context that was looked up last
    before: Any  # int64 (MATCH,): the match of the next context without its newest token
    followers: Any  # int64 (SAMPLED,): tokens that followed a match
    follower_counts: Any  # int64 (SAMPLED,): how often each did
    votes: Any  # int64 (2 * most votes,): index of the token in `tokens`, feature, in turn
    tokens: Any  # int64 (MAX_CHOICES,): the tokens voted for
    scores: Any  # float64 (MAX_CHOICES + 1,): scores of these, later probabilities; the last is for "none of them"
    feature_levels: Any  # int64 (FEATURES,), see `feature_levels`
    levels: Any  # int64 (MAX_CHOICES * KINDS,): highest level of each token's votes, by kind of memory
    logits_tokens: Any  # int64 (most logits,): tokens of the logits that vote
    noisy_logits: Any  # float64 (most logits,): these logits, with noise where `noisy`


def new_predictor(
    num_logits: int,
    sources: int,
    noise: tuple[int, int] | None,
    model_ngrams: np.ndarray | None = None,
    temperature: float = 1.0,
    corpora: Sequence[Corpus] = (),
) -> Predictor:
    """Make the predictor for one text: it predicts next tokens from the pool's tables and other kinds of memory.

    Args:
        num_logits: K, number of top-k logits in an entry of the tables; 0: stored logits do not vote for tokens.
        sources: bit mask of the kinds of memory that vote, 1 << kind for each: TEXT, WINDOW, GUESS, LOGITS.
        noise: (seed, sequence number) of the sampler's Gumbel noise, which is added to logits before they vote; None:
            no noise is added.
        model_ngrams: array of a file of model n-grams (logits measured once for a model); None: model n-grams do not
            vote.
        temperature: temperature of the sampler, by which the logits of model n-grams are divided.
        corpora: corpora (indexes of files) to search, at most MAX_INDEXES, the most important first: if their matches
            are equally long, the first corpus votes.
    """
    of_model = ModelNgrams.of(model_ngrams)
    votes = 2 * (len(ORDERS) * M + 6 * M + num_logits + of_model.num_logits + MAX_CHOICES + 2)
    most_logits = max(num_logits, of_model.num_logits)
    return Predictor(
        sources=sources,
        noise_key=U64(sequence_key(*noise)) if noise else U64(0),
        noisy=noise is not None,
        context=new_context(MAX_MATCH if corpora else MAX_CONTEXT),
        keys=compiled_zeros(NUM_CONTEXTS, "u8"),
        entries=compiled_zeros(NUM_CONTEXTS + 1, "i8"),
        last_step=new_last_step(0),
        model_ngrams=of_model,
        temperature=float(temperature),
        num_corpora=len(corpora),
        corpora=(*corpora, *[Corpus.of(None)] * (MAX_INDEXES - len(corpora))),
        match=compiled_zeros(MATCH, "i8"),
        before=compiled_ints(NOTHING_KNOWN),
        followers=compiled_zeros(SAMPLED, "i8"),
        follower_counts=compiled_zeros(SAMPLED, "i8"),
        votes=compiled_zeros(votes, "i8"),
        tokens=compiled_zeros(MAX_CHOICES, "i8"),
        scores=compiled_zeros(MAX_CHOICES + 1, "f8"),
        feature_levels=compiled_array(feature_levels()),
        levels=compiled_zeros(MAX_CHOICES * KINDS, "i8"),
        logits_tokens=compiled_zeros(most_logits, "i8"),
        noisy_logits=compiled_zeros(most_logits, "f8"),
    )


@jit
def uniform(bits):
    """Turn 64 random bits into a number between 0 and 1, both excluded, exactly as `lp.sampling.noise` does.

    Args:
        bits: uint64, random bits.
    """
    return min((float(bits >> S11) + 0.5) * 2.0**-53, BELOW_1)


@jit
def gumbel(key, token):
    """Calculate the Gumbel noise that the sampler adds to a token's logit (see `lp.sampling.noise`).

    Args:
        key: uint64, key of the noise at one position of the text.
        token: token id.
    """
    bits = mix((U64(token + 1) * GOLDEN + key) & MASK)
    return -log(-log(uniform(bits)))


@jit
def look_up(tables, predictor, known, position):
    """Find the table entries that may vote for the next token.

    It fills `predictor.keys` and `predictor.entries`. To hide the latency of memory, it first reads one key of every
    bucket, then finds the entries, and reads one follower of each. Such reads overlap, since none waits for the result
    of another.

    Args:
        tables: Tables, the pool's memory.
        predictor: Predictor, whose context must be hashed already.
        known: number of tokens in the context.
        position: position of the token to predict, as returned by `text_position`.
    """
    context, keys, entries, sources = predictor.context, predictor.keys, predictor.entries, predictor.sources
    for index in range(NUM_CONTEXTS):
        keys[index] = 0
    for index in range(len(ORDERS)):
        if sources >> TEXT & 1 and ORDERS[index] <= known:
            keys[TEXT_AT + index] = context_key(context.hashes[ORDERS[index]], TEXT, 0)
    for order in range(min(known, MAX_GUESS_ORDER) + 1):
        if sources >> WINDOW & 1 and order:
            keys[WINDOW_AT + order] = context_key(context.hashes[order], WINDOW, 0)
        if sources >> GUESS & 1:
            keys[GUESS_AT + order] = context_key(context.hashes[order], GUESS, position)
    for order in range(min(known, MAX_LOGITS_ORDER) + 1):
        if sources >> LOGITS & 1:
            keys[LOGITS_AT + order] = logits_key(context, order, position)
    touched = I64(0)
    for index in range(LOGITS_AT):
        touched += I64(tables.keys[bucket(tables.keys, keys[index])] & ONE)
    for index in range(LOGITS_AT, NUM_CONTEXTS):
        touched += I64(tables.logits_keys[bucket(tables.logits_keys, keys[index])] & ONE)
    for index in range(LOGITS_AT):
        entries[index] = entry = find(tables.keys, keys[index])
        touched += tables.followers[max(entry, 0) * M] & 1
    for index in range(LOGITS_AT, NUM_CONTEXTS):
        entries[index] = find(tables.logits_keys, keys[index])
    entries[NUM_CONTEXTS] = touched  # or the compiler would leave the reads out


@jit
def vote(tables, predictor, choices, votes, token, feature):
    """Record one vote for a next token: the weight of the vote's feature is added to the token's score.

    At most MAX_CHOICES tokens can have votes; votes for other tokens are ignored.

    Args:
        tables, predictor: Tables (with the weights) and Predictor (with the scores).
        choices, votes: number of tokens with votes, and number of votes, so far.
        token: id of the token to vote for.
        feature: index of the feature, which says what kind of vote this is.

    Returns:
        `choices` and `votes` after this vote.
    """
    index = choices
    for choice in range(choices):  # to the end: no branch for the processor to guess
        index = choice if predictor.tokens[choice] == token else index
    if index == MAX_CHOICES:
        return choices, votes
    if index == choices:
        predictor.tokens[index] = token
        predictor.scores[index] = 0.0
        choices += 1
    predictor.scores[index] += tables.weights[feature]
    predictor.votes[2 * votes] = index
    predictor.votes[2 * votes + 1] = feature
    return choices, votes + 1


@jit
def vote_followers(tables, predictor, choices, votes, entry, feature):
    """Let one entry of the tables vote for the tokens that followed its context earlier.

    The feature of a vote depends only on the rank of the follower in the entry, the newest follower first.

    Args:
        tables, predictor: Tables (the pool's memory) and Predictor (with the scores).
        choices, votes: number of tokens with votes, and number of votes, so far.
        entry: index of the entry; -1: there is no entry, and nothing is voted for.
        feature: index of the feature for the first follower; the features for the next ones come right after it.

    Returns:
        `choices` and `votes` after these votes.
    """
    if entry >= 0:
        for rank in range(M):
            follower = tables.followers[entry * M + rank]
            if follower == 0:
                break
            choices, votes = vote(tables, predictor, choices, votes, (follower >> 32) - 1, feature + rank)
    return choices, votes


@jit
def vote_guesses(tables, predictor, choices, votes, order, feature):
    """Let guesses vote for the next token: tokens that were sampled earlier for its position.

    Guesses from the last step vote first.

    Args:
        tables, predictor: Tables (the pool's memory) and Predictor (with the scores).
        choices, votes: number of tokens with votes, and number of votes, so far.
        order: number of tokens before the position that have to match.
        feature: index of the feature for the first guess; the features for the next ones come right after it.

    Returns:
        `choices` and `votes` after these votes.
    """
    guesses, entry = predictor.last_step.guesses, predictor.entries[GUESS_AT + order]
    if entry >= 0:
        for older in range(entry * M, entry * M + M):
            if tables.followers[older] == 0:
                break
            add_older_guess(guesses, order * M, tables.followers[older] >> 32)
    for rank in range(M):
        guess = guesses[order * M + rank]
        if guess == 0:
            break
        choices, votes = vote(tables, predictor, choices, votes, guess - 1, feature + rank)
    return choices, votes


@jit
def vote_text(tables, predictor, choices, votes):
    """Let n-grams of the text vote for the next token.

    The feature of a vote depends on the number of tokens that match, the rank of the follower in its entry, how often
    it followed, and whether it is the only follower.

    Args:
        tables, predictor: Tables (the pool's memory) and Predictor (with the scores).
        choices, votes: number of tokens with votes, and number of votes, so far.

    Returns:
        Number of context lengths in ORDERS for which an entry was found; then `choices` and `votes` after these votes.
    """
    matched = 0
    for index in range(len(ORDERS)):
        entry = predictor.entries[TEXT_AT + index]
        if entry < 0:
            break  # a longer context is no more known than a shorter one
        matched = index + 1
        base = entry * M
        single = 1 if tables.followers[base + 1] == 0 else 0
        for rank in range(M):
            follower = tables.followers[base + rank]
            if follower == 0:
                break
            count = min(follower & 0xFFFFFFFF, 3) - 1
            feature = TEXT_0 + ((index * M + rank) * 3 + count) * 2 + single
            choices, votes = vote(tables, predictor, choices, votes, (follower >> 32) - 1, feature)
    return matched, choices, votes


@jit_called
def search_corpora(corpora, num_corpora, recent, known, before, match, followers, counts):
    """Find the longest run of a text's newest tokens that occurs in any corpus, and count which tokens follow it there.

    Nothing is searched if the text without its newest token has a match at one place alone, and the newest token
    follows there. The match is then continued at this place.

    Args:
        corpora: tuple of MAX_INDEXES Corpus (indexes of files).
        num_corpora: number of corpora to search, from the first on.
        recent: int64, the newest tokens of the text, the newest first.
        known: number of tokens in `recent`.
        before: int64 (MATCH,), the match found for the text without its newest token.
        match: int64 (MATCH,), overwritten with the match that is found.
        followers: int64 (SAMPLED,), overwritten with the distinct tokens that follow the match.
        counts: int64 (SAMPLED,), overwritten with the number of times that each of these tokens follows.

    Returns:
        Number of distinct tokens that follow, 0 if there is no match; and number of occurrences that were counted.
    """
    most = min(before[MATCH_LENGTH] + 1, MAX_MATCH)
    corpus, place = corpora[before[MATCH_CORPUS]], before[MATCH_PLACE]
    newest = corpus.tokens + place + 1  # where the newest token is, if it followed
    if place >= 0 and corpus.numbers[newest] == recent[0] and corpus.numbers[newest + 1] != SEPARATOR:
        match[MATCH_CORPUS], match[MATCH_LENGTH], match[MATCH_PLACE] = before[MATCH_CORPUS], most, place + 1
        followers[0], counts[0] = corpus.numbers[newest + 1], 1
        return 1, 1
    most = min(known, max(most, 2))
    left_out = 0  # a bit for each corpus whose rows of its longest run are gone, as far as they are looked at
    while True:
        best, first, behind = 0, 0, 0
        match[MATCH_CORPUS], match[MATCH_PLACE] = 0, -1
        for index in range(num_corpora):
            length, begin, end = 0, 0, 0
            if left_out >> index & 1 == 0:
                length, begin, end = find_match(corpora[index], recent, most)
            if length > best:
                best, first, behind = length, begin, end
                match[MATCH_CORPUS] = index
        match[MATCH_LENGTH] = best
        if best == 0:
            return 0, 0
        found, rows, place = count_followers(corpora[match[MATCH_CORPUS]], first, behind, followers, counts)
        if found > 0:
            match[MATCH_PLACE] = place
            return found, rows
        left_out |= 1 << match[MATCH_CORPUS]


@jit
def vote_corpora(tables, predictor, known, choices, votes):
    """Let the corpus (index of files) with the longest match vote for the tokens that follow this match in its files.

    The feature of a vote depends on the length of the match, its number of occurrences, and the fraction of them that
    the token follows.

    Args:
        tables, predictor: Tables (with the weights) and Predictor (with the corpora and the scores).
        known: number of tokens in the context.
        choices, votes: number of tokens with votes, and number of votes, so far.

    Returns:
        Index of the feature that scores "none of these tokens", -1 if no corpus has a match; then `choices` and `votes`
        after these votes.
    """
    recent, before, match = predictor.context.tokens, predictor.before, predictor.match
    followers, counts = predictor.followers, predictor.follower_counts
    of = predictor.corpora
    found, rows = search_corpora(of, predictor.num_corpora, recent, known, before, match, followers, counts)
    if found == 0:
        return -1, choices, votes
    of_match = bucket_of(match[MATCH_LENGTH], LENGTHS) * (len(ROWS) + 1) + bucket_of(rows, ROWS)
    for _ in range(min(found, M)):
        most = 0
        for index in range(found):
            if counts[index] > counts[most]:
                most = index
        feature = CORPUS_0 + of_match * SHARES + share_bucket(counts[most], rows)
        choices, votes = vote(tables, predictor, choices, votes, followers[most], feature)
        counts[most] = 0
    return CORPUS_NONE_0 + of_match, choices, votes


@jit
def bucket_of(value, limits):
    """Sort a value into a class from 0 to len(limits): the number of limits that it reaches.

    Args:
        value: number to sort.
        limits: lower limits of the classes from 1 on, ascending.
    """
    reached = 0
    while reached < len(limits) and value >= limits[reached]:
        reached += 1
    return reached


@jit
def share_bucket(count, rows):
    """Sort a token into a class from 0 to 5 by the fraction of a match's occurrences that the token follows.

    The classes 0 to 4 are: below 1/10, below 1/4, below 1/2, below 4/5, below 1. In class 5, the token follows all
    occurrences.

    Args:
        count: number of occurrences that the token follows.
        rows: number of all occurrences that were counted.
    """
    if count == rows:
        return 5
    if 2 * count < rows:
        return 0 if 10 * count < rows else 1 if 4 * count < rows else 2
    return 3 if 5 * count < 4 * rows else 4


@jit
def gap_bucket(gap):
    """Sort the gap between two logits into a class from 0 to GAPS - 1: the number of THRESHOLDS that it reaches."""
    bucket = 0
    while bucket < GAPS - 1 and gap >= THRESHOLDS[bucket]:
        bucket += 1
    return bucket


@jit
def vote_logits(tables, predictor, position, key, choices, votes):
    """Let stored top-k logits vote for the next token: logits that were computed after the longest matching context.

    The sampler's noise at the token's position is added to the logits first.

    Args:
        tables, predictor: Tables (the pool's memory) and Predictor, in which the context has been looked up.
        position: position of the token to predict, as returned by `text_position`.
        key: uint64, key of the sampler's noise at this position.
        choices, votes: number of tokens with votes, and number of votes, so far.

    Returns:
        Number of context tokens that matched, -1 if no logits were found; then `choices` and `votes` after these votes.
    """
    width = len(tables.logits_tokens) // len(tables.logits_keys)
    if predictor.sources >> LOGITS & 1 == 0:
        return -1, choices, votes
    for order in range(MAX_LOGITS_ORDER, -1, -1):
        node, entry = predictor.last_step.nodes[order], predictor.entries[LOGITS_AT + order]
        if node < 0 and entry < 0:
            continue
        if node >= 0:
            seen_at = text_position(tables, predictor.last_step.samples.positions[node] + 1)
            for k in range(width):
                token, logit = logits_of_node(predictor.last_step, node, k)
                predictor.logits_tokens[k] = token
                predictor.noisy_logits[k] = logit
        else:
            seen_at = tables.logits_positions[entry]
            for k in range(width):
                predictor.logits_tokens[k] = tables.logits_tokens[entry * width + k]
                predictor.noisy_logits[k] = tables.logits_values[entry * width + k]
        same_position = 1 if seen_at == position else 0
        group = LOGITS_0 + (order * 2 + same_position) * 4 * GAPS
        choices, votes = vote_by_rank(tables, predictor, width, key, group, choices, votes)
        return order, choices, votes
    return -1, choices, votes


@jit
def vote_model(tables, predictor, known, logits_order, key, choices, votes):
    """Let model n-grams vote for the next token, if they know a longer context than the stored top-k logits do.

    Model n-grams are logits that were measured once for a model, after frequent contexts. The sampler's noise at the
    token's position is added to them first.

    Args:
        tables, predictor: Tables (with the weights) and Predictor (with the model n-grams and the scores).
        known: number of tokens in the context.
        logits_order: number of context tokens that matched for the stored logits, -1 if none were found; only longer
            contexts vote here.
        key: uint64, key of the sampler's noise at this position.
        choices, votes: number of tokens with votes, and number of votes, so far.

    Returns:
        Number of context tokens that matched, 0 if no model n-gram did; then `choices` and `votes` after these votes.
    """
    model, context = predictor.model_ngrams, predictor.context
    if model.num_logits == 0:
        return 0, choices, votes
    for order in range(min(known, MAX_LOGITS_ORDER), max(logits_order, 0), -1):
        row = find(model.keys, context_key(context.hashes[order], MODEL, 0))
        if row < 0:
            continue
        start = row * model.num_logits
        for k in range(model.num_logits):
            predictor.logits_tokens[k] = model.tokens[2 * (start + k) + TOKEN]
            predictor.noisy_logits[k] = model.logits[2 * (start + k) + LOGIT] / predictor.temperature
        group = MODEL_0 + ((order - 1) * 2 + (1 if logits_order > 0 else 0)) * 4 * GAPS
        choices, votes = vote_by_rank(tables, predictor, model.num_logits, key, group, choices, votes)
        return order, choices, votes
    return 0, choices, votes


@jit
def vote_by_rank(tables, predictor, width, key, group, choices, votes):
    """Add the sampler's noise to some logits, and let each logit vote for its token.

    The feature of a vote depends on the rank of the logit (0 to 3) and on its gap to the largest logit; for the largest
    logit, on the gap to the second. A logit more than FAR below the largest gets no vote.

    Args:
        tables, predictor: Tables (with the weights) and Predictor, with the logits in `logits_tokens` and
            `noisy_logits`.
        width: number of these logits.
        key: uint64, key of the sampler's noise at this position.
        group: index of the first feature for this kind of memory and number of matching tokens.
        choices, votes: number of tokens with votes, and number of votes, so far.

    Returns:
        `choices` and `votes` after these votes.
    """
    first, second, third = -math.inf, -math.inf, -math.inf
    for k in range(width):
        score = predictor.noisy_logits[k]
        if predictor.noisy and score > first - 2 * FAR:  # noise above FAR is once in e^FAR times
            score += gumbel(key, predictor.logits_tokens[k])
        predictor.noisy_logits[k] = score
        if score > first:
            first, second, third = score, first, second
        elif score > second:
            second, third = score, second
        elif score > third:
            third = score
    for k in range(width):
        score = predictor.noisy_logits[k]
        if first - score > FAR:
            continue
        rank = 0 if score >= first else 1 if score >= second else 2 if score >= third else 3
        gap = first - second if rank == 0 else first - score
        feature = group + rank * GAPS + gap_bucket(gap)
        choices, votes = vote(tables, predictor, choices, votes, predictor.logits_tokens[k], feature)
    return choices, votes


@jit
def vote_together(tables, predictor, choices, votes):
    """Give each token one more vote, whose feature says which kinds of memory have voted for it, and how surely.

    Args:
        tables, predictor: Tables (with the weights) and Predictor (with the votes and the scores).
        choices, votes: number of tokens with votes, and number of votes, so far.

    Returns:
        `votes` after these votes.
    """
    levels = predictor.levels
    for at in range(choices * KINDS):
        levels[at] = 0
    for index in range(votes):
        level = predictor.feature_levels[predictor.votes[2 * index + 1]]
        at = predictor.votes[2 * index] * KINDS + level % KINDS
        levels[at] = max(levels[at], level // KINDS)
    for choice in range(choices):
        feature = 0
        for kind in range(KINDS):
            feature = feature * LEVELS[kind] + levels[choice * KINDS + kind]
        feature += TOGETHER_0
        predictor.scores[choice] += tables.weights[feature]
        predictor.votes[2 * votes] = choice
        predictor.votes[2 * votes + 1] = feature
        votes += 1
    return votes


@jit
def predict(tables, predictor, known, position):
    """Predict which tokens may follow a context, and with what probabilities.

    It fills `predictor.tokens` and `predictor.scores`. The score after the last token's is the probability that none of
    these tokens follows.

    Args:
        tables: Tables, the pool's memory.
        predictor: Predictor, whose context holds the newest tokens.
        known: number of tokens in the context.
        position: position in the text of the token to predict, from 0.

    Returns:
        Number of predicted tokens, and number of the votes from which their scores were summed.
    """
    hash_context(predictor.context, known)
    key = mix((predictor.noise_key + U64(position) * GOLDEN + GOLDEN) & MASK)
    in_text = text_position(tables, position)
    look_up(tables, predictor, known, in_text)
    search_step(predictor.last_step, predictor.context, known, position)
    logits_order, choices, votes = vote_logits(tables, predictor, in_text, key, 0, 0)
    model_order, choices, votes = vote_model(tables, predictor, known, logits_order, key, choices, votes)
    matched, choices, votes = vote_text(tables, predictor, choices, votes)
    for order in range(MAX_GUESS_ORDER + 1):
        if order:
            entry, feature = predictor.entries[WINDOW_AT + order], WINDOW_0 + (order - 1) * M
            choices, votes = vote_followers(tables, predictor, choices, votes, entry, feature)
        if predictor.sources >> GUESS & 1:
            choices, votes = vote_guesses(tables, predictor, choices, votes, order, GUESS_0 + order * M)
    corpus_none = -1
    if predictor.num_corpora > 0:
        corpus_none, choices, votes = vote_corpora(tables, predictor, known, choices, votes)
    votes = vote_together(tables, predictor, choices, votes)
    none = NONE_0 + matched * 5 + logits_order + 1
    if model_order > 0:
        order = (model_order - 1) * (MAX_LOGITS_ORDER + 1) + logits_order + 1
        none = MODEL_NONE_0 + order * (len(ORDERS) + 1) + matched
    predictor.votes[2 * votes] = choices
    predictor.votes[2 * votes + 1] = none
    predictor.scores[choices] = tables.weights[none]
    votes += 1
    if corpus_none >= 0:
        predictor.votes[2 * votes] = choices
        predictor.votes[2 * votes + 1] = corpus_none
        predictor.scores[choices] += tables.weights[corpus_none]
        votes += 1
    softmax(predictor.scores, choices + 1)
    return choices, votes


@jit
def softmax(scores, count):
    """Turn the first `count` scores into probabilities, in place."""
    top, total = -math.inf, 0.0
    for index in range(count):
        top = max(top, scores[index])
    for index in range(count):
        scores[index] = exp(scores[index] - top)
        total += scores[index]
    for index in range(count):
        scores[index] /= total


@jit
def learn(tables, predictor, choices, votes, token):
    """Train the weights of the features by one token of the text: one step of Adagrad on its log probability.

    Args:
        tables: Tables, whose weights change.
        predictor: Predictor, with the prediction that `predict` has just made for this token.
        choices, votes: numbers that `predict` returned.
        token: id of the token that actually follows in the text.
    """
    correct = 0
    while correct < choices and predictor.tokens[correct] != token:
        correct += 1
    for vote_index in range(votes):
        index, feature = predictor.votes[2 * vote_index], predictor.votes[2 * vote_index + 1]
        gradient = (1.0 if index == correct else 0.0) - predictor.scores[index]
        tables.squares[feature] += gradient * gradient
        tables.weights[feature] += LEARNING_RATE * gradient / math.sqrt(tables.squares[feature])


@jit
def learn_text(tables, predictor, text, start, length):
    """Train the weights of the features by a text's new tokens; each token is predicted from the tokens before it.

    Args:
        tables: Tables, whose weights change.
        predictor: Predictor, overwritten.
        text: int64, token ids of the prompt and the generated tokens.
        start: index of the first new token.
        length: number of tokens in the text.
    """
    for end in range(start, length):
        known = fill_context(predictor.context, text, 0, end)
        choices, votes = predict(tables, predictor, known, end)
        learn(tables, predictor, choices, votes, text[end])
