"""The file of a corpus, an index of tokenized files: how it is made, and how it is read.

`lp corpus build` writes the file. Every process maps it into memory and none writes to it, so ranks on one machine
share its memory pages. Functions compiled by numba (`lp.draft.pool.corpus`) search it without checks, so all that they
read is checked when the file is opened.

The file holds one int64 array: a header of HEADER numbers, then these parts of int32 numbers, without gaps:

    tokens    n      the tokens of all files, with a SEPARATOR before the first file, between files and after the last
    rows      r      places in `tokens` at which a match may end: tokens with at least one token before and one after
                     them in their file; sorted by the last MAX_MATCH tokens up to the place, read backwards
    firsts    V + 1  for each token v, the index of the first pair whose newer token is v
    pairs     d      the older token of each distinct pair that the last two tokens of a row form; pairs are sorted by
                     the newer token, then by the older one
    starts    d + 1  for each pair, its first row
    listing          the list of the files (`Listing`), as JSON in UTF-8

V: size of the vocabulary; n: number of tokens, separators included; r: number of rows; d: number of pairs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from lp.commands import app_command
from lp.digest import chain_digest
from lp.draft.pool.corpus import HEADER, MAX_MATCH, SEPARATOR, places_of
from lp.errors import UserError

MARK = 0x73757072_6F6331  # first number of such a file; another layout gets another mark
MAX_TOKENS = (1 << 31) - 16
READ_BYTES = 64 << 20  # of a file that is read; a larger one is mapped


FileState = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """One source file of a corpus, as it was when the corpus was made.

    Attributes:
        path: path of the file, relative to the corpus' folder.
        size: size in bytes.
        modified_ns: time of its last change, in nanoseconds since 1970.
        num_tokens: number of its tokens; in a delta (an index of changed files), 0 for a file that was deleted.
    """

    path: str
    size: int
    modified_ns: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The source files of a corpus, by which `lp corpus watch` sees which files have changed since they were indexed.

    Attributes:
        folder: path of the folder that was indexed.
        tokenizer: digest of the tokenizer.
        files: all source files, in the order of their tokens in the corpus.
        base: 0 for a corpus. For a delta (an index of changed files, kept beside a corpus): digest (`identity_of`) of
            the corpus in which these files replace the files with the same paths.
    """

    folder: str
    tokenizer: int
    files: list[IndexedFile]
    base: int = 0


UNLISTED = Listing("", 0, [])  # for an index that is in no file


def new_file(vocabulary_size: int, texts: Sequence[np.ndarray], listing: Listing) -> np.ndarray:
    """Make the array of a corpus: an index of tokenized texts, in which runs of tokens can be found.

    Args:
        vocabulary_size: V, number of tokens in the model's vocabulary.
        texts: token ids of each text, int32, one-dimensional.
        listing: list of the source files, stored as the last part of the array.

    Returns:
        int64 array, one-dimensional: a header, the index, and the listing as JSON.

    Raises:
        ValueError: the texts have more tokens than an index can hold, or a token that is not in the vocabulary.
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
    header = np.array([MARK, vocabulary_size, count, len(rows), len(starts), len(written), 0, 0])
    parts = [tokens, rows, firsts, older[starts], np.append(starts, len(rows))]
    index = b"".join(part.astype("<i4").tobytes() for part in parts)
    header[6] = chain_digest(0, header[1:5], _numbers(index))
    contents = _numbers(index + written)
    header[7] = chain_digest(0, header[:7], contents)
    return np.concatenate([header, contents])


def _numbers(data: bytes) -> np.ndarray:
    return np.frombuffer(data + bytes(-len(data) % 8), "<i8")


def _sorted_rows(tokens: np.ndarray) -> np.ndarray:
    """The part `rows` of an index of these tokens; they are sorted by 1, 2, 4, ... MAX_MATCH tokens in turn."""
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
    """Read a corpus from its file and check all of it; a file larger than READ_BYTES is memory-mapped.

    A mapped file may be replaced by another file, but must never be overwritten in place: the array would change, and
    the process would crash if the file became shorter.

    Args:
        path: path of the file.
        vocabulary_size: V, number of tokens in the model's vocabulary.

    Returns:
        The corpus' array, int64.

    Raises:
        ValueError: the file is missing, damaged, or was made for a model with another vocabulary.
    """
    remedy = f"write it with {app_command('corpus')} build FOLDER --model MODEL -o FILE"
    file = mapped(path)
    if file.nbytes <= READ_BYTES:
        file = np.array(file)
    if not _is_whole(file):
        raise UserError(f"corpus {str(path)!r} is damaged: it is not what was written; {remedy}")
    if file[1] != vocabulary_size:
        raise UserError(f"corpus {str(path)!r} is of {file[1]} tokens, and the model has {vocabulary_size}; {remedy}")
    return file


def mapped(path: str | Path) -> np.ndarray:
    """Memory-map the array in a corpus' file, and check only its header.

    Args:
        path: path of the file.

    Raises:
        ValueError: the file can't be read, or does not begin like a corpus.
    """
    remedy = f"write one with {app_command('corpus')} build FOLDER --model MODEL -o FILE"
    try:
        file = open_memmap(path, mode="c")  # c: of a type that compiled functions take
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"corpus {str(path)!r} can't be read ({error}); {remedy}") from None
    if file.ndim != 1 or file.dtype != np.int64 or len(file) < HEADER or file[0] != MARK:
        raise UserError(f"{str(path)!r} holds no corpus; {remedy}")
    return file


def identity_of(file: np.ndarray) -> int:
    """Digest of a corpus' whole contents, by which a delta (an index of changed files) names the corpus it belongs to.

    Args:
        file: the corpus' array.
    """
    return int(file[7])


def delta_path(path: str | Path) -> Path:
    """Path of a corpus' delta: a small index of the files that have changed since the corpus was made.

    Args:
        path: path of the corpus' file.
    """
    return Path(f"{path}.delta")


def state_of(path: str | Path) -> FileState:
    """Inode, size in bytes and time of change in ns of a file, by which a change is noticed; None if there is no file.

    Args:
        path: path of the file.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def digest_of(file: np.ndarray) -> int:
    """Digest of the parts of a corpus that look-ups read, by which ranks check that they have equal corpora.

    The list of source files is left out, since machines may keep equal files in different folders.

    Args:
        file: the corpus' array.
    """
    return int(file[6])


def contents_of(file: np.ndarray) -> tuple[Listing, list[np.ndarray]] | None:
    """Split a corpus' array into its list of source files and the tokens of each file.

    Args:
        file: the corpus' array.

    Returns:
        The listing, and the token ids of each listed file, int32; None if the array is damaged.
    """
    if not _is_whole(file):
        return None
    at, numbers, listing = places_of(file), np.asarray(file).view(np.int32), listing_of(file)
    return listing, [numbers[at.tokens + begin : at.tokens + end] for begin, end in spans_of(listing)]


def listing_of(file: np.ndarray) -> Listing:
    """Read the list of source files from a corpus' array.

    Args:
        file: the corpus' array, which must have been checked before.
    """
    data = np.asarray(file).view(np.int32)[places_of(file).listing :].tobytes()[: int(file[5])]
    listed = json.loads(data)
    return Listing(**listed | {"files": [IndexedFile(**each) for each in listed["files"]]})


def spans_of(listing: Listing) -> list[tuple[int, int]]:
    """Begin and end (exclusive) of each listed file's tokens, as indices among the corpus' tokens, separators included.

    Args:
        listing: the list of a corpus' source files.
    """
    ends = np.cumsum([each.num_tokens + 1 for each in listing.files], dtype=np.int64).tolist()
    return [(end - each.num_tokens, end) for each, end in zip(listing.files, ends, strict=True)]


def _is_whole(file: np.ndarray) -> bool:
    """Whether the array has the length that its header states, the digest that was written, and only valid indices."""
    if any(number < 0 for number in file[1:6].tolist()) or max(file[1:6].tolist()) > MAX_TOKENS:
        return False
    at = places_of(file)
    whole = len(file) == HEADER + -(-(at.end - 2 * HEADER) // 2)
    if not whole or chain_digest(0, file[:7], file[HEADER:]) != file[7]:
        return False
    numbers = np.asarray(file).view(np.int32)
    tokens, rows, firsts, pairs, starts, _ = (numbers[begin:end] for begin, end in pairwise(at))
    ends = len(tokens) > 0 and tokens[0] == tokens[-1] == SEPARATOR
    known = ends and tokens.min() >= SEPARATOR and tokens.max() < file[1]
    inside = known and rows.min(initial=1) >= 1 and rows.max(initial=0) < len(tokens) - 1
    inside = inside and all((tokens[rows + offset] != SEPARATOR).all() for offset in (-1, 0, 1))
    ordered = all((each[1:] >= each[:-1]).all() and each[0] == 0 for each in (firsts, starts))
    return bool(inside and ordered and firsts[-1] == len(pairs) and starts[-1] == len(rows))
