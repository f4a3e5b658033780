"""A corpus: what its index finds, against a search in plain Python, and the file that it lies in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lp.compiled import compiled_ints, compiled_zeros
from lp.draft.pool.corpus import MAX_MATCH, SAMPLED, Corpus, count_followers, find_match
from lp.draft.pool.corpus_file import (
    IndexedFile,
    Listing,
    contents_of,
    digest_of,
    listing_of,
    new_file,
    read_file,
    spans_of,
)
from lp.draft.pool.model_ngrams import write_file
from lp.errors import UserError
from tests.support.corpora import corpus_of


def searched(texts: Sequence[Sequence[int]], text: Sequence[int]) -> tuple[int, Counter[int]]:
    """The longest end of the text that comes in one of the texts before a token, and what followed, how often."""
    for length in range(min(len(text), MAX_MATCH), 1, -1):
        end = list(text[-length:])
        found = Counter(
            each[at + length]
            for each in texts
            for at in range(len(each) - length)
            if list(each[at : at + length]) == end
        )
        if found:
            return length, found
    return 0, Counter()


def looked_up(corpus: Corpus, text: Sequence[int]) -> tuple[int, Counter[int], int]:
    """The length of the match, its followers that were counted, and how many rows it has."""
    recent = compiled_ints(list(text[: -MAX_MATCH - 4 : -1]))
    length, first, behind = find_match(corpus, recent, len(recent))
    followers, counts = compiled_zeros(SAMPLED, "i8"), compiled_zeros(SAMPLED, "i8")
    found = 0
    if length:
        found, counted, _ = count_followers(corpus, first, behind, followers, counts)
        assert counted == sum(counts[:found])
        assert counted == min(behind - first, SAMPLED) or len(corpus.gone)
    return length, Counter(dict(zip(followers[:found], counts[:found], strict=True))), behind - first


@pytest.mark.parametrize("seed", range(12))
def test_a_look_up_finds_what_a_search_finds(seed: int) -> None:
    """A match across two files, a row too few, or a shorter match than there is, costs accepted tokens and shows in no
    text."""
    rng = random.Random(seed)
    vocabulary = rng.choice([2, 5, 30, 300])
    texts = [[rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 2, 3, 40]))] for _ in range(rng.randint(1, 9))]
    for _ in range(rng.randint(0, 6)):  # so that long runs come several times
        source = rng.choice(texts)
        copied = source[rng.randint(0, len(source)) :]
        texts.append(
            [*(rng.randrange(vocabulary) for _ in range(rng.randrange(3))), *copied, rng.randrange(vocabulary)]
        )
    corpus = Corpus.of(corpus_of(texts, vocabulary))
    lengths = Counter[int]()
    for _ in range(300):
        source = rng.choice(texts)
        begin = [rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 9, 40]))]
        start = rng.randint(0, len(source))
        text = [*begin, *source[start : start + rng.choice([1, 2, 3, 9, 40])]]
        length, followers = searched(texts, text)
        found, counts, rows = looked_up(corpus, text)
        assert found == length and rows == followers.total()
        if rows <= SAMPLED:
            assert counts == followers
        else:
            assert all(counts[token] <= followers[token] for token in counts)
        lengths[length] += 1
    assert lengths[0] < 300


def test_a_match_is_no_longer_than_can_be_told_apart() -> None:
    """Rows are sorted by MAX_MATCH tokens: what comes before them has no order, and a search by it would miss rows."""
    run = list(range(100, 100 + MAX_MATCH))
    texts = [[*range(older, older + 3), *run, follower] for older, follower in ((50, 1), (10, 2), (30, 1), (10, 3))]
    corpus = Corpus.of(corpus_of(texts, 400))
    for older in (10, 30, 50, 200):
        length, counts, rows = looked_up(corpus, [older, older + 1, older + 2, *run])
        assert (length, rows, counts) == (MAX_MATCH, 4, Counter({1: 2, 2: 1, 3: 1}))


def test_of_many_rows_some_are_counted_evenly_spread() -> None:
    """The first rows alone would be those of one context among many."""
    texts = [[older, 1, 2, older % 4 + 3] for older in range(100, 500)]
    length, counts, rows = looked_up(Corpus.of(corpus_of(texts, 500)), [1, 2])
    assert (length, rows) == (2, 400) and counts.total() == SAMPLED
    assert len(counts) > 1
    texts = [[older, 1, 2, 3 if older < 250 else 4] for older in range(200, 300)]
    _, counts, _ = looked_up(Corpus.of(corpus_of(texts, 500)), [1, 2])
    assert abs(counts[3] - SAMPLED / 2) <= 1 and counts[3] + counts[4] == SAMPLED


def test_a_token_beyond_the_vocabulary_matches_nothing() -> None:
    """A text may have tokens that the tokenizer of the files never gives."""
    corpus = Corpus.of(corpus_of([[1, 2, 3, 4]], 5))
    assert looked_up(corpus, [1, 2, 9])[0] == looked_up(corpus, [9, 2])[0] == 0
    assert looked_up(corpus, [2, 3])[0] == 2


def test_a_corpus_without_a_row() -> None:
    """Files of one token have nothing to look up."""
    corpus = Corpus.of(corpus_of([[1], [], [2, 3]], 5))
    assert [looked_up(corpus, text)[0] for text in ([2, 3], [1, 2], [3])] == [0, 0, 0]
    assert looked_up(Corpus.of(None), [1, 2])[0] == 0


def test_what_was_indexed_is_given_back(tmp_path: Path) -> None:
    """A build that reads no unchanged file again takes their tokens from here."""
    texts = [[1, 2, 3], [], [4, 4]]
    path = tmp_path / "é.corpus"
    write_file(corpus_of(texts, 5), path)
    found = contents_of(read_file(str(path), 5))
    assert found and [each.tolist() for each in found[1]] == texts
    assert found[0] == Listing("folder", 7, [IndexedFile(f"{i}.py", 10 * i, i, len(t)) for i, t in enumerate(texts)])


def test_a_corpus_that_is_overwritten_stays_what_it_was(tmp_path: Path) -> None:
    """`cp` onto the file of a running program would change what it drafts, or end it with a signal."""
    path = tmp_path / "a.corpus"
    write_file(corpus_of([[1, 2, 3]], 5), path)
    file = read_file(str(path), 5)
    digest, size = digest_of(file), path.stat().st_size
    with path.open("r+b") as other:
        other.write(bytes(size))
    assert contents_of(file) and digest_of(file) == digest
    path.write_bytes(b"")
    assert looked_up(Corpus.of(file), [1, 2])[0] == 2


def test_the_same_files_have_the_same_digest() -> None:
    """Ranks of several machines compare digests of corpora that each machine may have built for itself."""
    texts = [np.array(text, np.int32) for text in ([1, 2] * 30, [2, 1] * 30)]
    one, other = (
        new_file(5, texts, Listing(folder, 0, [IndexedFile("a", 60, at, 60), IndexedFile("b", 60, at, 60)]))
        for folder, at in (("/one/place", 1), ("/srv/another", 22))
    )
    assert digest_of(one) == digest_of(other) != digest_of(new_file(6, texts, Listing("/one/place", 0, [])))


def test_a_corpus_is_small() -> None:
    """16 bytes a token, besides what the vocabulary takes: it lies in the memory of every machine that uses it."""
    rng = random.Random(0)
    text = [rng.randrange(1000) for _ in range(5000)]
    listing = Listing("", 0, [IndexedFile("a", 0, 0, len(text))])
    assert new_file(1000, [np.array(text, np.int32)], listing).nbytes <= 16 * len(text) + 4 * 1000 + 400


def test_tokens_of_another_model_are_refused(tmp_path: Path) -> None:
    """They would be drafted, and index the model's embeddings."""
    path = tmp_path / "a.corpus"
    write_file(corpus_of([[1, 2, 3]], 5), path)
    with pytest.raises(UserError, match=r"a\.corpus' is of 5 tokens, and the model has 6; write it with"):
        read_file(str(path), 6)
    with pytest.raises(UserError, match="gave token 9, and the model has 5"):
        corpus_of([[1, 9, 3]], 5)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_gone_is_not_found(seed: int) -> None:
    """The old text of a file that is edited agrees with what is typed, longer than anything else, and is wrong."""
    rng = random.Random(seed)
    vocabulary = rng.choice([3, 5, 30])
    texts = [[rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 3, 25]))] for _ in range(rng.randint(1, 6))]
    for _ in range(rng.randint(2, 6)):
        source = rng.choice(texts)
        texts.append([*source[rng.randint(0, len(source)) :], rng.randrange(vocabulary)])
    texts.append([rng.randrange(vocabulary) for _ in range(25)])
    gone = {len(texts) - 1, *rng.sample(range(len(texts)), rng.randrange(len(texts)))}
    file = corpus_of(texts, vocabulary)
    spans = [spans_of(listing_of(file))[index] for index in sorted(gone)]
    corpus = Corpus.of(file, [end for span in spans for end in span])
    live = [text for index, text in enumerate(texts) if index not in gone]
    exact = sum(len(texts[index]) for index in gone) <= SAMPLED
    others = 0
    for _ in range(200):
        source = rng.choice(texts)
        start = rng.randint(0, len(source))
        text = [*([vocabulary - 1] * rng.randrange(3)), *source[start : start + rng.choice([1, 2, 3, 9, 40])]]
        length, followers = searched(live, text)
        found, counts, rows = looked_up(corpus, text)
        assert found <= length or not counts
        if exact and rows <= SAMPLED and length:
            assert (found, counts) == (length, followers)
        if found == length:
            assert all(counts[token] <= followers[token] for token in counts)
        others += searched(texts, text) != (length, followers)
    assert others


def test_a_row_among_many_that_are_gone() -> None:
    """Looking for what is left ends: a file of ten thousand equal lines that was deleted must not cost a step."""
    texts = [[1, 2, 3]] * 500 + [[7, 1, 2, 4]]
    file = corpus_of(texts, 9)
    spans = spans_of(listing_of(file))
    corpus = Corpus.of(file, [end for span in spans[:500] for end in span])
    assert looked_up(corpus, [7, 1, 2])[:2] == (3, Counter({4: 1}))
    assert not looked_up(corpus, [1, 2])[1]
    assert looked_up(Corpus.of(file, [0, spans[-1][1]]), [7, 1, 2])[0] == 0
