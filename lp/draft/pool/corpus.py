"""Look-ups in a corpus: an immutable index of tokenized files that finds what followed the end of a text in them.

A look-up finds the longest run of the text's newest tokens, 2 to MAX_MATCH of them, that occurs in a file, and the
tokens behind its occurrences.

The index is a suffix array: its rows are the places in the files at which a match may end, sorted by the tokens there
read backwards. So places that end alike are neighbours, whatever the length of the match. `lp.draft.pool.corpus_file`
makes the index and describes its layout.

Files may have changed since. Ranges of tokens that are gone are listed beside the index; no look-up finds their rows.

V: vocabulary; n: tokens, separators included; r: rows; d: distinct pairs of last two tokens of rows.
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
    """A corpus in the form that compiled functions search; an empty one, with V = 0, stands for no corpus."""

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
        """Make a corpus for compiled functions.

        Args:
            file: a corpus' array, int64, see `lp.draft.pool.corpus_file`; None: an empty corpus.
            gone: begin and end of every range of tokens that are gone, in turn, ascending.
        """
        ranges = compiled_ints(gone)
        if file is None:
            return cls(0, compiled_array(np.zeros(2 * HEADER, np.int32)), 0, 0, 0, 0, 0, ranges)
        at = places_of(file)
        numbers = compiled_array(np.asarray(file).view(np.int32))
        return cls(int(file[1]), numbers, at.tokens, at.rows, at.firsts, at.pairs, at.starts, ranges)


class Places(NamedTuple):
    """Where each part of a corpus' array begins, as an index in int32 numbers; `end` is where the last part ends.

    `lp.draft.pool.corpus_file` describes the parts; `listing` is the JSON.
    """

    tokens: int
    rows: int
    firsts: int
    pairs: int
    starts: int
    listing: int
    end: int


def places_of(file: np.ndarray) -> Places:
    """Find where the parts of a corpus' array begin, from the sizes in its header."""
    _, vocabulary, tokens, rows, pairs, listing_bytes, *_ = file[:HEADER].tolist()
    sizes = [2 * HEADER, tokens, rows, vocabulary + 1, pairs, pairs + 1, -(-listing_bytes // 4)]
    return Places(*np.cumsum(sizes).tolist())


@jit
def find_match(corpus, recent, known):
    """Find where the longest possible run of a text's newest tokens occurs in a corpus.

    Args:
        corpus: Corpus.
        recent: int64, the newest tokens of the text, the newest first.
        known: how many of them to match, at most; no more than MAX_MATCH are.

    Returns:
        (length, first, behind): tokens of the match, 0 if not even 2 match; and the rows first..behind-1 of the index,
        which are its occurrences.
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
    """Whether a token of a corpus is gone because its file has changed.

    `gone` has begins and ends in turn, so the place is inside a range if an odd number of them is not behind it.

    Args:
        corpus: Corpus.
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
    """Length of the match at the nearest row that is not gone, among rows that end with the text's last two tokens.

    Args:
        corpus, recent, known: arguments of `find_match`.
        row: the row to begin at.
        end: the row to stop before.
        step: 1 or -1, the direction; at most SAMPLED rows are looked at.

    Returns:
        Tokens that this row has in common with the text; 0 if all rows that were looked at are gone.
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
    """Whether the occurrence at a row has the newest `length` tokens of the text, given that the last two match.

    Args:
        corpus, recent: arguments of `find_match`.
        row: number of the row in the index.
        length: tokens to compare.
    """
    newest = corpus.tokens + corpus.numbers[corpus.rows + row]
    index = 2
    while index < length and corpus.numbers[newest - index] == recent[index]:
        index += 1
    return index == length


@jit
def count_followers(corpus, first, behind, followers, counts):
    """Count which tokens followed a match in the files of a corpus, to draft the most frequent ones.

    Each row of the match is one occurrence. Of more than SAMPLED rows only SAMPLED, evenly spread, are looked at; rows
    whose tokens are gone are not counted.

    Args:
        corpus: Corpus.
        first, behind: the rows of the match, first..behind-1, as `find_match` returns them.
        followers: int64 (SAMPLED,), filled with the distinct followers in the order of their rows.
        counts: int64 (SAMPLED,), filled with the number of rows of each follower.

    Returns:
        Number of distinct followers; number of rows counted; and, if the match has only one row, the place of its
        newest token among the corpus' tokens, else -1.
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
