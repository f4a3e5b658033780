"""Look-ups in a corpus (an index of tokenized files): which tokens follow a text's last tokens in these files.

A look-up finds the longest run of the text's newest tokens, 2 to MAX_MATCH of them, that occurs in a file. It returns
the tokens that follow the occurrences.

The index is a suffix array and never changes. A row of the index is a place in the files at which a match may end. Rows
are sorted by the tokens up to their place, read backwards, so places with the same last tokens are neighbours, however
long the match is. `lp.draft.pool.corpus_file` makes the index and describes its layout.

Files may have changed since they were indexed. Ranges of tokens that are gone are listed separately, and look-ups skip
rows in these ranges.

V: size of the vocabulary; n: number of tokens, separators included; r: number of rows; d: number of distinct pairs that
the last two tokens of rows form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lp.compiled import compiled_array, compiled_ints, jit

MAX_MATCH = 32  # tokens of the longest match
SAMPLED = 32  # rows of a match of which the followers are counted; more are counted in part, evenly spread
SEPARATOR = -1
HEADER = 8  # int64 numbers: a mark, V, n, r, d, bytes of JSON, digest of what look-ups read, digest of all the others


class Corpus(NamedTuple):
    """A corpus (an index of tokenized files) as arrays that functions compiled by numba search.

    An empty corpus, with V = 0, stands for no corpus: nothing is found in it.
    """

    vocabulary: int  # V
    numbers: Any  # int32: the whole array of the corpus
    tokens: int  # index in `numbers` at which the tokens begin; the next four are such indices too, see `Places`
    rows: int
    firsts: int
    pairs: int
    starts: int
    gone: Any  # int64: begin and end of every range of tokens that are gone, in turn, ascending

    @classmethod
    def of(cls, file: np.ndarray | None, gone: Sequence[int] = ()) -> Corpus:
        """Build a corpus (an index of tokenized files) in the form that functions compiled by numba search.

        Args:
            file: int64 array of the corpus' file, see `lp.draft.pool.corpus_file`; None gives an empty corpus, in which
                nothing is found.
            gone: ranges of tokens whose files have changed, as indices among the corpus' tokens: begin and end
                (exclusive) of each range in turn, ascending.
        """
        ranges = compiled_ints(gone)
        if file is None:
            return cls(0, compiled_array(np.zeros(2 * HEADER, np.int32)), 0, 0, 0, 0, 0, ranges)
        at = places_of(file)
        numbers = compiled_array(np.asarray(file).view(np.int32))
        return cls(int(file[1]), numbers, at.tokens, at.rows, at.firsts, at.pairs, at.starts, ranges)


class Places(NamedTuple):
    """Where each part of a corpus' array begins, as an index into the array viewed as int32.

    `end` is the end of the last part. `lp.draft.pool.corpus_file` describes the parts. `listing` is the JSON list of
    the indexed files.
    """

    tokens: int
    rows: int
    firsts: int
    pairs: int
    starts: int
    listing: int
    end: int


def places_of(file: np.ndarray) -> Places:
    """Calculate where each part of a corpus' array begins, from the sizes in the array's header.

    Args:
        file: the corpus' array, int64.
    """
    _, vocabulary, tokens, rows, pairs, listing_bytes, *_ = file[:HEADER].tolist()
    sizes = [2 * HEADER, tokens, rows, vocabulary + 1, pairs, pairs + 1, -(-listing_bytes // 4)]
    return Places(*np.cumsum(sizes).tolist())


@jit
def find_match(corpus, recent, known):
    """Find the longest run of a text's newest tokens that occurs in a corpus, and all its occurrences.

    Args:
        corpus: Corpus to search.
        recent: int64, the newest tokens of the text, the newest first.
        known: most tokens of `recent` to match; a match never has more than MAX_MATCH tokens.

    Returns:
        (length, first, behind): number of matched tokens, 0 if not even 2 match; the occurrences are the rows `first`
        to `behind` - 1 of the index.
    """
    numbers = corpus.numbers
    if known < 2 or recent[0] >= corpus.vocabulary:
        return 0, 0, 0
    low, last = numbers[corpus.firsts + recent[0]], numbers[corpus.firsts + recent[0] + 1]
    high = last
    while low < high:
        middle = (low + high) // 2
        if numbers[corpus.pairs + middle] < recent[1]:
            low = middle + 1
        else:
            high = middle
    if low == last or numbers[corpus.pairs + low] != recent[1]:
        return 0, 0, 0
    begin, end = numbers[corpus.starts + low], numbers[corpus.starts + low + 1]
    known = min(known, MAX_MATCH)
    if known == 2:
        return 2, begin, end
    low, high = begin, end  # between which the text would stand among the rows
    below, above = 2, 2  # tokens that the rows before `low` and at `high` have in common with it
    while low < high:
        middle = (low + high) // 2
        newest = corpus.tokens + numbers[corpus.rows + middle]
        length = min(below, above)
        while length < known and numbers[newest - length] == recent[length]:
            length += 1
        if length < known and numbers[newest - length] < recent[length]:
            low = middle + 1
            below = length
        else:
            high = middle
            above = length
    length = max(below, above)
    if len(corpus.gone) > 0:
        below = live_length(corpus, recent, known, low - 1, begin - 1, -1)
        length = max(below, live_length(corpus, recent, known, low, end, 1))
        if length == 0:
            return 0, 0, 0
    if length == 2:
        return 2, begin, end
    first, step, grows = low, 1, True
    while step > 0:
        if first - step >= begin and agrees(corpus, recent, first - step, length):
            first -= step
            step = step * 2 if grows else step // 2
        else:
            grows = False
            step //= 2
    behind, step, grows = low, 1, True
    while step > 0:
        if behind + step <= end and agrees(corpus, recent, behind + step - 1, length):
            behind += step
            step = step * 2 if grows else step // 2
        else:
            grows = False
            step //= 2
    return length, first, behind


@jit
def is_gone(corpus, place):
    """Whether a token of a corpus is gone, because its file has changed since it was indexed.

    `corpus.gone` holds the begin and the end of each range in turn. So a place is inside a range if an odd number of
    these values is less than or equal to the place.

    Args:
        corpus: Corpus to look in.
        place: index of the token among the corpus' tokens.
    """
    low, high = 0, len(corpus.gone)
    while low < high:
        middle = (low + high) // 2
        if corpus.gone[middle] <= place:
            low = middle + 1
        else:
            high = middle
    return low % 2 == 1


@jit
def live_length(corpus, recent, known, row, end, step):
    """Count how many newest tokens of a text match at the nearest row of the index whose file has not changed.

    A row is one place in the files. All rows looked at must match the text's last two tokens. At most SAMPLED rows are
    looked at.

    Args:
        corpus, recent, known: corpus, newest tokens of the text, and most tokens to match; see `find_match`.
        row: number of the row to look at first.
        end: number of the row at which to stop; this row is not looked at.
        step: direction of the search: 1 for the rows after `row`, -1 for the rows before it.

    Returns:
        Number of matching tokens; 0 if the files of all rows looked at have changed.
    """
    looked_at = 0
    while row != end and looked_at < SAMPLED:
        place = corpus.numbers[corpus.rows + row]
        if not is_gone(corpus, place):
            length = 2
            while length < known and corpus.numbers[corpus.tokens + place - length] == recent[length]:
                length += 1
            return length
        row += step
        looked_at += 1
    return 0


@jit
def agrees(corpus, recent, row, length):
    """Whether a row of the index matches the newest `length` tokens of the text.

    The last two tokens are not compared: they are known to match.

    Args:
        corpus, recent: corpus, and newest tokens of the text, the newest first.
        row: number of the row in the index.
        length: number of tokens to compare.
    """
    newest = corpus.tokens + corpus.numbers[corpus.rows + row]
    index = 2
    while index < length and corpus.numbers[newest - index] == recent[index]:
        index += 1
    return index == length


@jit
def count_followers(corpus, first, behind, followers, counts):
    """Count which tokens follow a match in the files of a corpus, so that the most frequent ones can be drafted.

    Each row of the match is one occurrence. If there are more than SAMPLED rows, only SAMPLED of them, evenly spread,
    are looked at. Rows whose files have changed are not counted.

    Args:
        corpus: Corpus in which the match was found.
        first, behind: rows of the match, from `first` to `behind` - 1, as `find_match` returns them.
        followers: int64 (SAMPLED,), overwritten with the distinct tokens that follow, in the order of their rows.
        counts: int64 (SAMPLED,), overwritten with the number of rows that each of these tokens follows.

    Returns:
        Number of distinct tokens that follow; number of rows counted; and, if the match has only one row, the index of
        its newest token among the corpus' tokens, else -1.
    """
    rows = behind - first
    looked_at = min(rows, SAMPLED)
    found, counted, last = 0, 0, -1
    for sample in range(looked_at):
        place = corpus.numbers[corpus.rows + first + sample * rows // looked_at]
        if is_gone(corpus, place):
            continue
        last = place
        counted += 1
        follower = corpus.numbers[corpus.tokens + place + 1]
        index = 0
        while index < found and followers[index] != follower:
            index += 1
        if index == found:
            followers[index] = follower
            counts[index] = 0
            found += 1
        counts[index] += 1
    return found, counted, last if counted == 1 and looked_at == rows else -1
