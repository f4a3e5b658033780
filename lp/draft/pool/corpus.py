"""A corpus: tokenized files in one immutable index that finds where the end of a text came before, and what followed.

`lp corpus build` writes the file, every process maps it into memory and none writes to it; ranks of a node share its
pages. A look-up finds the longest run of the text's newest tokens, of 2 to MAX_MATCH, that a file has.

The file is one int64 array: HEADER numbers, then int32 numbers: all files' tokens with a SEPARATOR before, between and
behind them; the rows, which are the places in them that have two tokens of a file before their follower, sorted by the
tokens there read backwards; the distinct last two tokens of rows, by the newest; where the rows of each begin. Last
comes what the files are, as JSON. So the rows that end alike are neighbours, whatever the length.

V: vocabulary; n: tokens, separators included; r: rows; d: distinct last two tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import open_memmap

from lp.commands import app_command
from lp.compiled import compiled_array, jit
from lp.digest import chain_digest
from lp.errors import UserError

MAX_MATCH = 32  # tokens of the longest match
SAMPLED = 32  # rows of a match of which the followers are counted; more are counted in part, evenly spread
SEPARATOR = -1
MARK = 0x73757072_6F6331  # of such a file, and of how it is laid out
HEADER = 7  # int64 numbers: MARK, V, n, r, d, bytes of JSON, digest of all the others
MAX_TOKENS = (1 << 31) - 16


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file that a corpus has.

    Attributes:
        path: relative to the corpus' folder.
        size: bytes.
        modified_ns: when it was last changed.
        num_tokens: how many tokens it has.
    """

    path: str
    size: int
    modified_ns: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Listing:
    """What a corpus was made of.

    Attributes:
        folder: in which the files lie.
        tokenizer: a digest of what made tokens of them.
        files: in the order of their tokens.
    """

    folder: str
    tokenizer: int
    files: list[IndexedFile]


class Corpus(NamedTuple):
    """A corpus as compiled functions take it: its numbers, and where each kind begins. V = 0: none."""

    vocabulary: int  # V
    numbers: Any  # int32: the whole file
    tokens: int  # where the tokens begin; like the next four
    rows: int
    firsts: int  # of every newest token, the first of its last two
    pairs: int  # the older of the last two tokens
    starts: int  # the first row of the last two tokens

    @classmethod
    def of(cls, file: np.ndarray | None) -> Corpus:
        """A corpus for compiled functions, from the contents of a file; None gives none."""
        if file is None:
            return cls(0, compiled_array(np.zeros(2 * HEADER, np.int32)), 0, 0, 0, 0, 0)
        at = _places(file)
        numbers = compiled_array(np.asarray(file).view(np.int32))
        return cls(int(file[1]), numbers, at.tokens, at.rows, at.firsts, at.pairs, at.starts)


class _Places(NamedTuple):
    """Where each part of a file begins, in int32 numbers; the last is where the JSON ends."""

    tokens: int
    rows: int
    firsts: int
    pairs: int
    starts: int
    listing: int
    end: int


def _places(file: np.ndarray) -> _Places:
    _, vocabulary, tokens, rows, pairs, listing_bytes, _ = file[:HEADER].tolist()
    sizes = [2 * HEADER, tokens, rows, vocabulary + 1, pairs, pairs + 1, -(-listing_bytes // 4)]
    return _Places(*np.cumsum(sizes).tolist())


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
def agrees(corpus, recent, row, length):
    """Whether a row of the same last two tokens ends with the newest `length` tokens."""
    newest = corpus.tokens + corpus.numbers[corpus.rows + row]
    index = 2
    while index < length and corpus.numbers[newest - index] == recent[index]:
        index += 1
    return index == length


@jit
def count_followers(corpus, first, behind, followers, counts):
    """Count what followed the rows of a match, or SAMPLED of them, evenly spread.

    Args:
        corpus: Corpus.
        first, behind: the rows.
        followers: int64 (SAMPLED,), gets distinct followers in the order of their rows.
        counts: int64 (SAMPLED,), gets how many rows each has.

    Returns:
        How many followers there are, and how many rows were counted.
    """
    rows = behind - first
    counted = min(rows, SAMPLED)
    found = 0
    for sample in range(counted):
        row = first + sample * rows // counted
        follower = corpus.numbers[corpus.tokens + corpus.numbers[corpus.rows + row] + 1]
        index = 0
        while index < found and followers[index] != follower:
            index += 1
        if index == found:
            followers[index] = follower
            counts[index] = 0
            found += 1
        counts[index] += 1
    return found, counted


def new_file(vocabulary_size: int, texts: Sequence[np.ndarray], listing: Listing) -> np.ndarray:
    """A file's array, int64.

    Args:
        vocabulary_size: V.
        texts: tokens of every file, int32.
        listing: what the files are.

    Raises:
        ValueError: more tokens than an index can have, or one beyond the vocabulary.
    """
    count = sum(map(len, texts)) + len(texts) + 1
    if count > MAX_TOKENS:
        raise UserError(f"{count:,} tokens are more than {MAX_TOKENS:,}, which is all that a corpus holds; divide it")
    tokens = np.full(count, SEPARATOR, np.int32)
    at = 1
    for text in texts:
        tokens[at : at + len(text)] = text
        at += len(text) + 1
    if tokens.max() >= vocabulary_size:
        raise UserError(f"the tokenizer gave token {tokens.max()}, and the model has {vocabulary_size}")
    rows = _sorted_rows(tokens)
    newest, older = tokens[rows], tokens[rows - 1]
    begins = np.ones(len(rows), bool)
    begins[1:] = (newest[1:] != newest[:-1]) | (older[1:] != older[:-1])
    starts = np.flatnonzero(begins)
    firsts = np.searchsorted(newest[starts], np.arange(vocabulary_size + 1))
    written = json.dumps(asdict(listing)).encode()
    header = np.array([MARK, vocabulary_size, count, len(rows), len(starts), len(written), 0])
    parts = [tokens, rows, firsts, older[starts], np.append(starts, len(rows))]
    data = b"".join(part.astype("<i4").tobytes() for part in parts) + written
    contents = np.frombuffer(data + bytes(-len(data) % 8), "<i8")
    header[6] = chain_digest(0, header[:6], contents)
    return np.concatenate([header, contents])


def _sorted_rows(tokens: np.ndarray) -> np.ndarray:
    """The rows of these tokens, sorted by the last MAX_MATCH tokens read backwards: 1, 2, 4, ... tokens are ranked."""
    ranks = tokens.astype(np.int64) + 1  # of the newest `length` tokens of every place
    length = 1
    while length < MAX_MATCH:
        keys = ranks * (int(ranks.max(initial=0)) + 1)
        keys[length:] += ranks[:-length]
        length *= 2
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        steps = np.zeros(len(keys), np.int64)
        np.cumsum(keys[1:] != keys[:-1], out=steps[1:])
        ranks[order] = steps
    is_row = np.zeros(len(tokens), bool)
    is_row[1:-1] = (tokens[:-2] >= 0) & (tokens[1:-1] >= 0) & (tokens[2:] >= 0)
    return order[is_row[order]]


def read_file(path: str, vocabulary_size: int) -> np.ndarray:
    """The corpus in a file, memory-mapped and checked whole.

    Args:
        path: of the file.
        vocabulary_size: V of the model.

    Raises:
        ValueError: no such file, a damaged one, or one of another model.
    """
    remedy = f"write it with {app_command('corpus')} build FOLDER --model MODEL -o FILE"
    file = mapped(path)
    if not _is_whole(file):
        raise UserError(f"corpus {str(path)!r} is damaged: it is not what was written; {remedy}")
    if file[1] != vocabulary_size:
        raise UserError(f"corpus {str(path)!r} is of {file[1]} tokens, and the model has {vocabulary_size}; {remedy}")
    return file


def mapped(path: str | Path) -> np.ndarray:
    """The contents of a file that begins as a corpus does.

    Raises:
        ValueError: it can't be read, or is something else.
    """
    remedy = f"write one with {app_command('corpus')} build FOLDER --model MODEL -o FILE"
    try:
        file = open_memmap(path, mode="c")  # c: of a type that compiled functions take
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"corpus {str(path)!r} can't be read ({error}); {remedy}") from None
    if file.ndim != 1 or file.dtype != np.int64 or len(file) < HEADER or file[0] != MARK:
        raise UserError(f"{str(path)!r} holds no corpus; {remedy}")
    return file


def digest_of(file: np.ndarray) -> int:
    """The digest of a file's contents, which was written with it."""
    return int(file[6])


def contents_of(file: np.ndarray) -> tuple[Listing, list[np.ndarray]] | None:
    """What the files were, and the tokens of each; None where the file is damaged."""
    if not _is_whole(file):
        return None
    at, numbers = _places(file), np.asarray(file).view(np.int32)
    data = numbers[at.listing :].tobytes()[: int(file[5])]
    listed = json.loads(data)
    files = [IndexedFile(**each) for each in listed.pop("files")]
    ends = at.tokens + np.cumsum([each.num_tokens + 1 for each in files], dtype=np.int64)
    texts = [numbers[end - each.num_tokens : end] for each, end in zip(files, ends.tolist(), strict=True)]
    return Listing(**listed, files=files), texts


def _is_whole(file: np.ndarray) -> bool:
    """Whether the array is as long as it says, and as it was written."""
    if any(number < 0 for number in file[1:6].tolist()) or max(file[1:6].tolist()) > MAX_TOKENS:
        return False
    whole = len(file) == HEADER + -(-(_places(file).end - 2 * HEADER) // 2)
    return bool(whole and chain_digest(0, file[:6], file[HEADER:]) == file[6])
