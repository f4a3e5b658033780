"""A corpus: tokenized files in one immutable index that finds where the end of a text came before, and what followed.

A look-up finds the longest run of the text's newest tokens, of 2 to MAX_MATCH, that a file of it has.

A corpus is one int64 array: HEADER numbers, then int32 numbers: all files' tokens with a SEPARATOR before, between and
behind them; the rows, which are the places in them that have two tokens of a file before their follower, sorted by the
tokens there read backwards; the distinct last two tokens of rows, by the newest; where the rows of each begin. Last
comes what the files are, as JSON. So the rows that end alike are neighbours, whatever the length.

What has changed since is told beside it: ranges of tokens that are gone, whose rows no look-up finds.

V: vocabulary; n: tokens, separators included; r: rows; d: distinct last two tokens.
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
    """A corpus as compiled functions take it: its numbers, where each kind begins, and what is gone. V = 0: none."""

    vocabulary: int  # V
    numbers: Any  # int32: the whole file
    tokens: int  # where the tokens begin; like the next four
    rows: int
    firsts: int  # of every newest token, the first of its last two
    pairs: int  # the older of the last two tokens
    starts: int  # the first row of the last two tokens
    gone: Any  # int64: where ranges of tokens that are gone begin and end, in turn and in order

    @classmethod
    def of(cls, file: np.ndarray | None, gone: Sequence[int] = ()) -> Corpus:
        """A corpus for compiled functions, from the contents of a file; None gives none."""
        ranges = compiled_ints(gone)
        if file is None:
            return cls(0, compiled_array(np.zeros(2 * HEADER, np.int32)), 0, 0, 0, 0, 0, ranges)
        at = places_of(file)
        numbers = compiled_array(np.asarray(file).view(np.int32))
        return cls(int(file[1]), numbers, at.tokens, at.rows, at.firsts, at.pairs, at.starts, ranges)


class Places(NamedTuple):
    """Where each part of a file begins, in int32 numbers; the last is where the JSON ends."""

    tokens: int
    rows: int
    firsts: int
    pairs: int
    starts: int
    listing: int
    end: int


def places_of(file: np.ndarray) -> Places:
    _, vocabulary, tokens, rows, pairs, listing_bytes, *_ = file[:HEADER].tolist()
    sizes = [2 * HEADER, tokens, rows, vocabulary + 1, pairs, pairs + 1, -(-listing_bytes // 4)]
    return Places(*np.cumsum(sizes).tolist())


@jit
def find_match(corpus, recent, known):
    """The longest run of the newest `known` tokens that came before, and the rows of it.

    Args:
        corpus: Corpus.
        recent: the newest tokens, the newest first.
        known: how many there are.

    Returns:
        The run's length, 0 for less than 2; its first row; the row behind its last one.
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
    """Whether a token's place lies in a range that is gone: an odd number of ends of ranges is not behind it."""
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
    """How many tokens the text has in common with the first of these rows that is not gone.

    Args:
        corpus, recent, known: arguments of `find_match`.
        row, end, step: the rows, of the text's last two tokens, of which SAMPLED are looked at.

    Returns:
        Their number, 0 where all rows are gone.
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
    """Whether a row of the same last two tokens ends with the newest `length` tokens."""
    newest = corpus.tokens + corpus.numbers[corpus.rows + row]
    index = 2
    while index < length and corpus.numbers[newest - index] == recent[index]:
        index += 1
    return index == length


@jit
def count_followers(corpus, first, behind, followers, counts):
    """Count what followed the rows of a match, or SAMPLED of them, evenly spread; none that is gone.

    Args:
        corpus: Corpus.
        first, behind: the rows.
        followers: int64 (SAMPLED,), gets distinct followers in the order of their rows.
        counts: int64 (SAMPLED,), gets how many rows each has.

    Returns:
        How many followers there are, how many rows were counted, and the place of the only row there is, or -1.
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
