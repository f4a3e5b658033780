"""The file of a corpus: making it of tokenized files, and reading it.

`lp corpus build` writes it, every process maps it into memory and none writes to it; ranks of a node share its pages.
`lp.draft.pool.corpus` has how it is laid out. Compiled functions look into it without a check: so all that they read
is checked when it is opened.
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

MARK = 0x73757072_6F6331  # of such a file, and of how it is laid out
MAX_TOKENS = (1 << 31) - 16
READ_BYTES = 64 << 20  # of a file that is read; a larger one is mapped


FileState = tuple[int, int, int] | None


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
        folder: where the files lie.
        tokenizer: a digest of what made tokens of them.
        files: all files, in the order of their tokens.
        base: 0, or for a delta the digest of the corpus in which these files stand for those of the same path.
    """

    folder: str
    tokenizer: int
    files: list[IndexedFile]
    base: int = 0


UNLISTED = Listing("", 0, [])  # of an index that lies in no file


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
    """The corpus in a file, checked whole: read, or memory-mapped where it is large.

    What is mapped changes with the file, and ends the process where the file has become shorter.

    Args:
        path: names the file.
        vocabulary_size: V of the model.

    Raises:
        ValueError: no such file, a damaged one, or one of another model.
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


def identity_of(file: np.ndarray) -> int:
    """The digest of all that the file has: a delta names its corpus by it."""
    return int(file[7])


def delta_path(path: str | Path) -> Path:
    """Where the delta of the corpus in a file is."""
    return Path(f"{path}.delta")


def state_of(path: str | Path) -> FileState:
    """What tells a file from another one that takes its place; None for none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def digest_of(file: np.ndarray) -> int:
    """The digest of what look-ups read, for ranks to compare: machines may keep the same files in other folders."""
    return int(file[6])


def contents_of(file: np.ndarray) -> tuple[Listing, list[np.ndarray]] | None:
    """What the files were, and the tokens of each; None where the file is damaged."""
    if not _is_whole(file):
        return None
    at, numbers, listing = places_of(file), np.asarray(file).view(np.int32), listing_of(file)
    return listing, [numbers[at.tokens + begin : at.tokens + end] for begin, end in spans_of(listing)]


def listing_of(file: np.ndarray) -> Listing:
    """What the files were, of a file that is whole."""
    data = np.asarray(file).view(np.int32)[places_of(file).listing :].tobytes()[: int(file[5])]
    listed = json.loads(data)
    return Listing(**listed | {"files": [IndexedFile(**each) for each in listed["files"]]})


def spans_of(listing: Listing) -> list[tuple[int, int]]:
    """Where the tokens of each file begin and end, among all tokens."""
    ends = np.cumsum([each.num_tokens + 1 for each in listing.files], dtype=np.int64).tolist()
    return [(end - each.num_tokens, end) for each, end in zip(listing.files, ends, strict=True)]


def _is_whole(file: np.ndarray) -> bool:
    """Whether the array is as long as it says, as it was written, and such that no look-up leads out of it."""
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
