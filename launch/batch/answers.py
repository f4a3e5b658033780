"""The file of answers, in OpenAI's batch format; a later run reads it to know which requests are answered already.

    {"id": "batch_req_5c1f...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}},
     "error": null}

A line is written when its answer is complete, and counts as answered once it is on the disk (fsync). The id is a digest
of the request. If a killed process or machine left the last line incomplete, that line is removed.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lp.errors import UserError
from lp.file_locks import lock

from .lines import SHOWN, Lines

START = b'{"id":"batch_req_'


class Answers:
    """The file of answers: knows which requests are answered, and appends new answers safely to the disk.

    Args:
        path: the file. It is created, or read and extended; only one process at a time may have it open.
        lines: the requests of the batch.

    Attributes:
        done: ids of the answered requests (`Line.key`).
        failed: how many of the answers are errors.

    Raises:
        ValueError: the file cannot be written, another process is writing it, or it has answers to other requests.
    """

    def __init__(self, path: Path, lines: Lines) -> None:
        self.path = path
        self.done: set[str] = set()
        self.failed = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._check_kind(lines)
            if not lock(self._file):
                raise UserError(f"{path} is being written by another run; wait for it, or give another out=")
            self._read(lines)
            _sync_folder(path.parent)
        except OSError as error:
            self.close()
            raise self._unwritable(error) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and release its lock, so that another process may write it."""
        os.close(self._file)

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Append answers; they are on the disk when this returns.

        Args:
            records: lines of the file as dicts, each made by `dispatch.record`.

        Raises:
            OSError: the disk is full or gone.
        """
        data = b"".join(json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records)
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            error.filename = str(self.path)  # which the message shows
            raise
        for record in records:
            self._note(record)

    def _note(self, record: dict[str, Any]) -> None:
        self.done.add(record["id"])
        self.failed += is_failed(record)

    def _check_kind(self, lines: Lines) -> None:
        """Refuse an output that no later run can read, as a pipe or a terminal, and the file of requests itself.

        Raises:
            ValueError: it is such a file.
        """
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"out is {self.path}, which is no file on a disk; give one, which the next run reads again")
        if os.path.samestat(status, os.stat(lines.path)):
            raise UserError(f"out is {self.path}, which is the file of requests; give another file")

    def _read(self, lines: Lines) -> None:
        """Note which requests are answered, and remove a last line that was not written to its end."""
        asked = {line.key for line in lines.lines}
        with open(self.path, "rb") as file:
            whole = 0
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n") or not data.strip(b"\0\n"):
                    break  # of the write that was cut off; zeros, where the machine ended in it
                self._check(number, data, asked)
                whole += len(data)
            file.seek(whole)
            torn = file.read()
        if not torn:
            return
        begun = torn.rstrip(b"\0\n")
        if not (begun.startswith(START) or START.startswith(begun)) or b"\n" in begun:
            raise self._other(f"line {number} is no answer")
        os.ftruncate(self._file, whole)
        os.fsync(self._file)

    def _check(self, number: int, data: bytes, asked: set[str]) -> None:
        """Note that a line's request is answered.

        Raises:
            ValueError: the line is no answer, or answers a request that this batch does not have.
        """
        try:
            record = json.loads(data)
            key, name, failed = record["id"], record["custom_id"], is_failed(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._other(f"line {number} is no answer") from None
        named = "" if name is None else f" (custom_id {str(name)[:SHOWN]!r})"
        if key not in asked:
            raise self._other(f"line {number}{named} answers what is not asked now")
        if key in self.done:
            raise self._other(f"line {number}{named} answers what another line does")
        self.done.add(key)
        self.failed += failed

    def _other(self, what: str) -> UserError:
        return UserError(f"{what} in {self.path}; give another out=, or take the line away")

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self.path} ({error.strerror}); give a file in a folder that is yours")


def is_failed(record: dict[str, Any]) -> bool:
    """Whether an answer is an error: no response at all, or another HTTP status than 200.

    Args:
        record: a line of the file of answers.
    """
    response = record["response"]
    return response is None or response["status_code"] != 200


def _sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk, so that a new file is found again after a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
