"""Record files of benchmarks: one JSON object per line for each prompt and method, appended as it is measured.

The records of one prompt are one write, which is on the disk before the next prompt begins. A killed process leaves at
most an incomplete end, which the next run cuts off: no written record is lost, and none is written twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lp.errors import UserError
from lp.file_locks import lock

Record = dict[str, Any]


class NoRecordsError(UserError):
    """A folder or file that should have benchmark records has none."""


def digest(value: Any) -> str:
    """Ten hex digits of a SHA-256, by which settings and prompts are told apart.

    Args:
        value: any value that JSON can hold; the order of dict keys does not count.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def slug(name: str) -> str:
    """A name as a safe part of a file name: "a b/c" becomes "a-b-c".

    Args:
        name: any text; beyond 80 characters it is cut.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "unnamed"


def load_records(path: str | Path) -> list[Record]:
    """Read the records in a file, or in all *.jsonl files in a folder and its subfolders, sorted by path.

    A last line without a line end was not written completely, and is skipped.

    Args:
        path: the file or folder.

    Raises:
        NoRecordsError: there are no records.
        ValueError: a line is no record; the message has its number.
    """
    path = Path(path)
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    records = [record for file in files if file.is_file() for record, _ in _lines(file, file.read_bytes())]
    if not records:
        raise NoRecordsError(f"{path} holds no records; give the folder that lp benchmark wrote to")
    return records


def _lines(path: Path, data: bytes) -> list[tuple[Record, int]]:
    """Every record, with the offset of the byte behind it."""
    found = []
    end = 0
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        end += len(line) + 1
        try:
            record = json.loads(line)
            record["index"], record["method"], record["prompt_digest"]  # what every record has
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number} is no record of a benchmark ({error}); move the file away"
            ) from None
        found.append((record, end))
    return found


class RecordFile:
    """A record file open for appending, by one process at a time; knows which prompts are finished.

    Args:
        path: the file; created with its folder if missing. Incomplete records at its end are cut off, and so is a last
            prompt that lacks some of the methods.
        methods: names of the methods; every prompt has a record of each, in this order.

    Attributes:
        records: all records in the file.

    Raises:
        ValueError: another process has the file open, it cannot be written, or it holds records of other methods.
    """

    def __init__(self, path: Path, methods: Sequence[str]) -> None:
        self.path = path
        self._methods = list(methods)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+")
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); give another out=") from error
        if not lock(self._file.fileno()):
            self._file.close()
            raise UserError(f"{path} is being written by another run; wait for it, or give another out=")
        self._file.seek(0)
        self.records = self._whole(_lines(path, self._file.read()))

    def _whole(self, lines: list[tuple[Record, int]]) -> list[Record]:
        """The records of finished prompts; what comes after them is cut off the file."""
        step = len(self._methods)
        finished = len(lines) // step * step
        for first in range(0, finished, step):
            block = [record for record, _ in lines[first : first + step]]
            if [record["method"] for record in block] != self._methods or len(
                {record["index"] for record in block}
            ) > 1:
                raise UserError(f"{self.path} holds records of other methods; move it away, or give another out=")
        self._file.truncate(lines[finished - 1][1] if finished else 0)
        return [record for record, _ in lines[:finished]]

    @property
    def done(self) -> dict[int, str]:
        """Digest of each finished prompt's text, by the prompt's index."""
        return {record["index"]: record["prompt_digest"] for record in self.records}

    def append(self, records: Iterable[Record]) -> None:
        """Append the records of one prompt; they are on the disk when this returns.

        Args:
            records: one record for each method, in the file's order of methods.
        """
        added = list(records)
        assert [record["method"] for record in added] == self._methods, "a prompt's records are written together"
        self._file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in added).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records += added

    def close(self) -> None:
        """Close the file, so that another process may extend it."""
        self._file.close()
