"""A corpus in the pool: what it votes for, how deep it drafts, and that ranks have the same ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import lp
from lp.draft.pool.corpus import MAX_MATCH, SAMPLED, Corpus
from lp.draft.pool.corpus_file import listing_of, spans_of
from lp.draft.pool.factory import PoolFactory, fresh_tables
from lp.draft.pool.mixture import (
    CORPUS_0,
    CORPUS_NONE_0,
    FEATURES,
    LEVELS,
    NONE_0,
    SHARES,
    TOGETHER_0,
    feature_levels,
)
from lp.draft.pool.model_ngrams import write_file
from lp.draft.pool.ngram_pool import NGramPool
from lp.draft.pool.tables import M
from lp.errors import UserError
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.draft.test_corpus import searched
from tests.support.corpora import corpus_of
from tests.support.pools import Ballot, ballot, empty_tables, logits_of, reads_of
from tests.support.tiny_models import VOCABULARY, plain_greedy, tiny_model

SMALL = lp.LookaheadConfig(pool_mib=1, window_size=0, ngram_size=2, guess_set_size=40)


def pool_with(corpora: Sequence[np.ndarray], prompt: Sequence[int], weights: np.ndarray | None = None) -> NGramPool:
    return NGramPool(SMALL, prompt, None, empty_tables(SMALL, weights), corpora=[*map(Corpus.of, corpora)])


def corpus_votes(at: Ballot) -> dict[int, int]:
    """The feature by which a corpus votes for each token."""
    return {at.tokens[index]: feature for index, feature in at.votes if CORPUS_0 <= feature < CORPUS_NONE_0}


def of_none(at: Ballot) -> list[int]:
    return [feature for index, feature in at.votes if index == len(at.tokens)]


def feature_of(length: int, count: int, rows: int) -> int:
    """The feature of a follower, written out."""
    longer = sum(length >= limit for limit in (3, 4, 5, 7, 10, 16, 32))
    more = sum(rows >= limit for limit in (2, 4, 10))
    share = 5 if count == rows else sum(count / rows >= limit for limit in (0.1, 0.25, 0.5, 0.8))
    return CORPUS_0 + (longer * 4 + more) * SHARES + share


def test_a_corpus_whose_rows_are_gone_leaves_the_vote_to_another() -> None:
    """Few of many rows are looked at; where all of these are gone, another corpus has the longest run."""
    file = corpus_of([[1, 2, 3]] * 500 + [[7, 1, 2, 4]], 9)
    spans = spans_of(listing_of(file))
    edited = Corpus.of(file, [end for span in spans[:500] for end in span])
    other = Corpus.of(corpus_of([[1, 2, 5]], 9))
    pool = NGramPool(SMALL, [1, 2, 3], None, empty_tables(SMALL, None), corpora=[edited, other])
    assert corpus_votes(ballot(pool, [1, 2])) == {5: feature_of(2, 1, 1)}
    assert corpus_votes(ballot(pool, [7, 1, 2])) == {4: feature_of(3, 1, 1)}


@pytest.mark.parametrize("seed", range(8))
def test_the_followers_of_the_longest_match_are_voted_for(seed: int) -> None:
    """By how long it is, how many rows it has, and the part of them that has the token; of many followers the first."""
    rng = random.Random(seed)
    vocabulary = rng.choice([4, 12, 60])
    texts = [[rng.randrange(vocabulary) for _ in range(30)] for _ in range(rng.randint(1, 6))]
    texts += [[rng.randrange(vocabulary), *rng.choice(texts)[rng.randrange(20) :]] for _ in range(8)]
    several = [corpus_of(texts[: len(texts) // 2], vocabulary), corpus_of(texts[len(texts) // 2 :], vocabulary)]
    one = [corpus_of(texts, vocabulary)]
    matched = 0
    for _ in range(60):
        source = rng.choice(texts)
        begin = rng.randrange(20)
        text = [*([vocabulary - 1] * rng.randrange(3)), *source[begin : begin + rng.randint(2, 12)]]
        for corpora, parts in ((one, [texts]), (several, [texts[: len(texts) // 2], texts[len(texts) // 2 :]])):
            at = ballot(pool_with(corpora, [1, 2, 3]), text)
            length, followers = max((searched(part, text) for part in parts), key=lambda found: found[0])
            if followers.total() > SAMPLED:
                continue
            features = {token: feature_of(length, count, followers.total()) for token, count in followers.items()}
            voted = corpus_votes(at)
            assert voted.items() <= features.items() and len(voted) == min(M, len(features))
            assert min(map(followers.get, voted), default=0) >= max(  # type: ignore[type-var]
                (count for token, count in followers.items() if token not in voted), default=0
            )
            both = [feature for feature in of_none(at) if feature >= CORPUS_NONE_0]
            expected = (next(iter(features.values())) - CORPUS_0) // SHARES + CORPUS_NONE_0 if features else None
            assert both == ([expected] if features else [])
            assert len([feature for feature in of_none(at) if NONE_0 <= feature < TOGETHER_0]) == 1
            matched += length > 0
    assert matched > 20


def test_what_kinds_say_together_has_the_corpus() -> None:
    """Long matches that are certain count as more; without a corpus the features are those that they were."""
    levels = feature_levels()
    assert len(levels) == FEATURES and LEVELS == (4, 4, 3, 5, 5)
    cases = [(2, 1, 1, 1), (4, 1, 3, 1), (4, 1, 2, 2), (6, 9, 9, 2), (7, 1, 2, 3), (32, 2, 2, 3)]
    for length, count, rows, level in cases:
        assert divmod(int(levels[feature_of(length, count, rows)]), len(LEVELS)) == (level, 0)
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    pool = pool_with([corpus_of(texts, 20)], [11, 12, 13])
    at = ballot(pool, texts[0][:8])
    together = [feature - TOGETHER_0 for _, feature in at.votes if TOGETHER_0 <= feature < CORPUS_0]
    assert [int(np.unravel_index(each, LEVELS)[0]) for each in together] == [3]
    without = ballot(pool_with([], [11, 12, 13, 11]), [11, 12, 13, 11])
    assert without.votes and max(feature for _, feature in without.votes) < TOGETHER_0 + 4 * 3 * 5 * 5


def test_a_corpus_that_never_matches_changes_nothing() -> None:
    """A prompt of another language than the repository's must be drafted as without it."""
    rng = random.Random(4)
    weights = np.array([rng.gauss(0, 1) for _ in range(FEATURES)])
    prompt = [rng.randrange(20) for _ in range(200)]
    elsewhere = [corpus_of([[rng.randrange(20, 40) for _ in range(300)], [1, 30, 2, 31]], 40)]
    drafts = [pool_with(corpora, prompt, weights).propose(prompt, 40) for corpora in (elsewhere, [])]
    assert drafts[0] == drafts[1] and len(drafts[0].tokens) == 40


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_has_the_probabilities_of_look_ups_from_scratch(seed: int) -> None:
    """Below a match of one place the next one is read, not searched for: a place off shows here."""
    rng = random.Random(seed)
    texts = [[rng.randrange(30) for _ in range(rng.choice([5, 25, 31]))] for _ in range(8)]
    texts += [[*rng.choice(texts)[rng.randrange(3) :], rng.randrange(30)][:31] for _ in range(6)]
    corpora = [corpus_of(texts[:5], 40), corpus_of(texts[5:], 40)]
    weights = np.array([rng.gauss(0, 0.5) for _ in range(FEATURES)])
    weights[CORPUS_0:CORPUS_NONE_0] += 3
    text = [39, *rng.choice(texts[:8])[: rng.choice([2, 3, 4])]]
    pool = pool_with(corpora, text, weights)
    tree = pool.propose(text, 40)
    again = pool_with(corpora, text, weights)
    paths: list[list[int]] = []
    for token, parent, prob in zip(tree.tokens, tree.parents, tree.accept_probs, strict=True):
        path = paths[parent] if parent >= 0 else []
        at = ballot(again, [*text, *path])
        before = tree.accept_probs[parent] if parent >= 0 else 1.0
        assert prob == pytest.approx(before * at.accept_probs[at.tokens.index(token)])
        paths.append([*path, token])
    assert paths and MAX_MATCH > 31, "or a look-up from scratch finds more places than one"


def test_a_long_match_is_followed_deep() -> None:
    """What a file has word for word is to be written in few steps; the file's end ends the path."""
    rng = random.Random(0)
    file = [rng.randrange(1000) for _ in range(80)]
    text = [5, 6, *file[:20]]
    of_file = Corpus.of(corpus_of([file, [9, 8, 7]], 1000))
    pool = NGramPool(SMALL, text, None, fresh_tables(SMALL, 1000), corpora=[of_file])
    tree = pool.propose(text, 40)
    path, node = [], -1
    while node in list(tree.parents):
        node = list(tree.parents).index(node)
        path.append(tree.tokens[node])
    assert len(path) >= 24 and path == file[20 : 20 + len(path)]
    text = [*file[:70]]
    pool = NGramPool(SMALL, text, None, fresh_tables(SMALL, 1000), corpora=[of_file])
    tree = pool.propose(text, 40)
    assert [*tree.tokens][:10] == file[70:] and 9 not in tree.tokens


def test_a_place_goes_on_through_equal_tokens() -> None:
    """A place that stays where it was finds the next of them, and never their end."""
    file = [1, 2, 3, 4, 7, 7, 7, 7, 8, 9, 5, 5, 5, 6]
    weights = np.zeros(FEATURES)
    weights[CORPUS_0:CORPUS_NONE_0] = 8
    tree = pool_with([corpus_of([file], 20)], [12, 13], weights).propose([12, 13, 1, 2, 3, 4], 12)
    assert [*tree.tokens][:10] == file[4:] and [*tree.parents][:10] == [*range(-1, 9)]


def test_weights_of_a_corpus_follow_the_text() -> None:
    """A repository whose files mislead is to be believed less and less."""
    rng = random.Random(1)
    pairs = [(key, rng.randrange(40)) for key in range(100, 300)]
    corpus = Corpus.of(corpus_of([[key, key, key, value] for key, value in pairs], 300))
    config = lp.LookaheadConfig(pool_mib=1)
    probs = []
    for right in (True, False):
        pool = NGramPool(config, [1, 2], None, fresh_tables(config, 300), corpora=[corpus])
        text = [1, 2]
        for key, value in pairs[:100]:
            new = [key, key, key, value if right else 99]
            text += new
            pool._learn(text, len(new), reads_of(len(text) - 1, [], logits_of([])))
        key, value = pairs[150]
        at = ballot(pool, [*text, key, key, key])
        probs.append(at.accept_probs[at.tokens.index(value)])
    assert probs[0] > 0.8 and probs[1] < 0.3


def test_ranks_decode_exactly_and_compare_corpora(tmp_path: Path) -> None:
    """Ranks with other corpora grow other trees, which the digest of a step would find only when it is too late."""
    model, rng = tiny_model(eos_token_id=None), random.Random(2)
    ids = [rng.randrange(VOCABULARY) for _ in range(20)]
    plain = plain_greedy(model, ids, 30)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    write_file(corpus_of([[*ids, *plain]], VOCABULARY), Path(paths[0]))
    write_file(corpus_of([ids], VOCABULARY), Path(paths[1]))

    def decode(paths_of: Sequence[str], context: ParallelContext) -> lp.GenerationOutput:
        config = lp.LookaheadConfig(window_size=2, ngram_size=2, guess_set_size=16, corpora=[paths_of[context.rank]])
        return lp.LookaheadDecoder(model, config, context).generate(ids, 30)

    outputs = run_lockstep(2, lambda context: decode([paths[0]] * 2, context))
    assert [output.tokens for output in outputs] == [plain, plain]
    alone = lp.LookaheadDecoder(model, lp.LookaheadConfig(window_size=2, ngram_size=2, guess_set_size=16))
    assert outputs[0].steps < alone.generate(ids, 30).steps, "the corpus has the text"

    def differ(context: ParallelContext) -> lp.GenerationOutput:
        config = lp.LookaheadConfig(adaptive=False, corpora=["here"])
        decoder = lp.LookaheadDecoder(model, config, context)
        others = PoolFactory(lp.LookaheadConfig(corpora=[paths[context.rank]]))  # as if each machine had its own
        decoder.factory.digests = others.digests  # type: ignore[method-assign]
        return decoder.generate(ids, 5)

    with pytest.raises(Exception, match="corpora"):
        run_lockstep(2, differ)


def test_a_corpus_that_is_missing_is_refused_before_a_text(tmp_path: Path) -> None:
    """One line that says how it is made."""
    decoder = lp.LookaheadDecoder(tiny_model(), lp.LookaheadConfig(corpora=[str(tmp_path / "none")]))
    with pytest.raises(UserError, match=r"corpus '.*none' can't be read .*corpus build FOLDER --model MODEL -o FILE"):
        decoder.generate([1, 2], 2)
