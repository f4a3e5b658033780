"""The file of answers, in OpenAI's batch format. It is the journal too: what it has is not asked again.

    {"id": "batch_req_5c1f...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}},
     "error": null}

A line is written once its answer is whole, and is on the disk (fsync) before it counts. The id is a digest of the
request. A last line that was cut off by the end of a process or a machine is taken away.
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
    """The answers that there are; new ones are added.

    Args:
        path: the file, which is made, or read and added to; by one process at a time.
        lines: the requests.

    Attributes:
        done: ids of the answers.
        failed: how many of them are errors.

    Raises:
        ValueError: it cannot be written, another process writes it, or it has answers to other requests.
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
        """Let another process have the file."""
        os.close(self._file)

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Write answers, which are on the disk when this returns.

        Raises:
            OSError: the disk is full, or has gone.
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
        """Refuse what cannot be read again, as a pipe or a terminal, and the file of requests.

        Raises:
            ValueError: it is such a file.
        """
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"out is {self.path}, which is no file on a disk; give one, which the next run reads again")
        if os.path.samestat(status, os.stat(lines.path)):
            raise UserError(f"out is {self.path}, which is the file of requests; give another file")

    def _read(self, lines: Lines) -> None:
        """Note what is answered, and take a line away that was not written to its end."""
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
        """Note the answer of a line.

        Raises:
            ValueError: it is none, or one to another request.
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
    """Whether an answer is an error."""
    response = record["response"]
    return response is None or response["status_code"] != 200


def _sync_folder(folder: Path) -> None:
    """Have the file's name on the disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
