"""The file of a history: texts that were generated earlier, the newest last; rank 0 appends each finished text.

The file begins with MARK and V (the size of the vocabulary), both int64. One record for each text follows: its number
of tokens (int64), their digest (int64), and the tokens (int32), all little-endian. A record is written at once. If a
process is killed while it writes, only the last record is incomplete, and the next process that opens the file removes
this record.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Sequence
from functools import partial
from io import FileIO
from pathlib import Path

import numpy as np

from lp.digest import chain_digest
from lp.errors import UserError
from lp.file_locks import lock

MARK = 0x6C702D68697374  # "lp-hist"
HEAD = 16  # bytes before the first record, and before the tokens of each


class HistoryFile:
    """Keeps the texts of one history on disk; the file is locked for other decoders as long as this object is open.

    Args:
        path: path of the file, which is made if it is missing.
        vocabulary_size: V, number of tokens in the model's vocabulary.
        most_tokens: number of tokens to keep, from the newest texts; when the file has more than twice as many, the
            oldest texts are removed.

    Raises:
        ValueError: another decoder has the file open; the file holds no history, or a history for another vocabulary;
            the file is damaged before its end; or it can't be read or written.
    """

    def __init__(self, path: str, vocabulary_size: int, most_tokens: int) -> None:
        self.path = os.path.realpath(path)  # a link stays one when another file takes the file's place
        self.most_tokens = most_tokens
        self._vocabulary_size = vocabulary_size
        self._file: FileIO | None = None
        try:
            self._file = _opened(self.path)
            data = _read(self._file)
            texts, end = _texts_of(data, self.path, vocabulary_size)
            if end < len(data):
                warnings.warn(f"the last {len(data) - end} bytes of history {path!r} were no whole text", stacklevel=2)
                self._file.truncate(end)
            if not end:
                _write(self._file, _header(vocabulary_size))
        except OSError as error:
            self.close()
            remedy = "give a file that can be written, in a folder that is there"
            if error.errno == errno.EMFILE:
                remedy = "each owner's stays open: raise the limit of open files (ulimit -n), or keep fewer owners"
            raise UserError(f"history {path!r} can't be used ({error}); {remedy}") from None
        except BaseException:
            self.close()
            raise
        self._tokens = sum(map(len, texts))

    def texts(self) -> list[np.ndarray]:
        """Read the newest texts from the file, at most `most_tokens` tokens in all.

        Returns:
            Token ids of each text, int32, the oldest text first.
        """
        assert self._file is not None
        texts, _ = _texts_of(_read(self._file), self.path, self._vocabulary_size)
        return newest(texts, self.most_tokens)

    def append(self, text: Sequence[int] | np.ndarray) -> None:
        """Write a finished text to the end of the file; if the file has become too long, remove its oldest texts.

        Args:
            text: token ids.

        Raises:
            OSError: the text could not be written, for example because the disk is full; the file is as it was before.
        """
        assert self._file is not None
        _write(self._file, _record(text))
        self._tokens += len(text)
        if self._tokens > 2 * self.most_tokens:
            self._tokens = self.most_tokens  # where it fails, it is tried again after as many more
            try:
                self._leave_out_oldest()
            except OSError as error:
                warnings.warn(f"the oldest texts of history {self.path!r} stay: {error}", stacklevel=2)

    def close(self) -> None:
        """Close and unlock the file, so that another decoder can open it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.close()

    def _leave_out_oldest(self) -> None:
        """Write the newest texts to a new file, and replace the old one by it."""
        kept = self.texts()
        part = Path(f"{self.path}.{os.getpid()}.part")
        part.unlink(missing_ok=True)  # of a process that had this number and was killed
        file = _appending(part)
        try:
            lock(file.fileno())
            _write(file, b"".join([_header(self._vocabulary_size), *map(_record, kept)]))
            part.replace(self.path)
        except OSError:
            file.close()
            part.unlink(missing_ok=True)
            raise
        self.close()
        self._file, self._tokens = file, sum(map(len, kept))


def newest(texts: list[np.ndarray], most_tokens: int) -> list[np.ndarray]:
    """Choose the newest of some texts, as many as have at most `most_tokens` tokens together.

    Args:
        texts: token ids of each text, the oldest text first.
        most_tokens: most tokens of the chosen texts together.

    Returns:
        The chosen texts, the oldest first.
    """
    total, first = 0, len(texts)
    while first and total + len(texts[first - 1]) <= most_tokens:
        first -= 1
        total += len(texts[first])
    return texts[first:]


def _appending(path: str | Path) -> FileIO:
    """Open a file for appending, made readable for this user alone if it is missing."""
    return FileIO(path, "a+", opener=partial(os.open, mode=0o600))


def _opened(path: str) -> FileIO:
    """Open a history file and lock it.

    Raises:
        ValueError: another decoder has it open.
    """
    while True:
        file = _appending(path)
        if not lock(file.fileno()):
            file.close()
            raise UserError(f"history {path!r} is in use by another decoder; give each its own file")
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
        file.close()  # the decoder that had it has put another file in its place


def _read(file: FileIO) -> bytes:
    file.seek(0)
    return file.readall()


def _write(file: FileIO, data: bytes) -> None:
    """Append all of the data or nothing: a record cut off by a full disk would make later ones unreadable."""
    size = file.seek(0, os.SEEK_END)
    try:
        written = file.write(data)
        if written < len(data):
            raise OSError(f"{len(data) - written} of {len(data)} bytes did not fit")
    except OSError:
        file.truncate(size)
        raise


def _header(vocabulary_size: int) -> bytes:
    return np.array([MARK, vocabulary_size], "<i8").tobytes()


def _record(text: Sequence[int] | np.ndarray) -> bytes:
    tokens = np.asarray(text, "<i4")
    return np.array([len(tokens), chain_digest(0, tokens)], "<i8").tobytes() + tokens.tobytes()


def _texts_of(data: bytes, path: str, vocabulary_size: int) -> tuple[list[np.ndarray], int]:
    """Parse a file: its texts, and how many of its first bytes are whole records.

    Raises:
        ValueError: it is no history of this model, or is damaged elsewhere than at its end.
    """
    remedy = "give another file, or move this one away"
    header = _header(vocabulary_size)
    if header.startswith(data.rstrip(b"\0")) and not data.startswith(header):
        return [], 0  # the process that made it was killed
    mark, vocabulary = np.frombuffer(data[:HEAD].ljust(HEAD, b"\0"), "<i8").tolist()
    if mark != MARK:
        raise UserError(f"{path!r} holds no history; {remedy}")
    if vocabulary != vocabulary_size:
        raise UserError(f"history {path!r} is of {vocabulary} tokens, and the model has {vocabulary_size}; {remedy}")
    texts: list[np.ndarray] = []
    at = HEAD
    while at < len(data):
        count, digest = np.frombuffer(data[at : at + HEAD].ljust(HEAD, b"\0"), "<i8").tolist()
        end = at + HEAD + 4 * max(count, 0)
        fits = count > 0 and end <= len(data)
        text = np.frombuffer(data, "<i4", count, at + HEAD) if fits else np.zeros(1, np.int32)
        if fits and chain_digest(0, text) == digest and text.min() >= 0 and text.max() < vocabulary_size:
            texts.append(text)
            at = end
        elif data[end if fits else at + HEAD :].strip(b"\0") and end <= len(data):
            raise UserError(f"history {path!r} is damaged at byte {at} of {len(data)}; {remedy}")
        else:  # cut off; some file systems leave zeros there
            break
    return texts, at
