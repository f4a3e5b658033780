"""The rows of a benchmark in a file: one JSON object a line for each prompt and method, appended as they are measured.

A prompt's rows are one write that reaches the disk before the next prompt begins. A process that is killed leaves at
most a torn tail, which the next one drops: no row is lost that was written, and none is written twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lp.errors import UserError

Row = dict[str, Any]


def digest(value: Any) -> str:
    """Ten hex digits that tell settings or prompts apart."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def slug(name: str) -> str:
    """A name as part of a file name: letters, digits, points, dashes and underscores, and no folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "unnamed"


def load_rows(path: str | Path) -> list[Row]:
    """The rows of a file, or of all files in a folder, sorted by name; the last line counts only with its end.

    Raises:
        ValueError: no rows there, or a line that is no row, named by its number.
    """
    path = Path(path)
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    rows = [row for file in files if file.is_file() for row, _ in _lines(file, file.read_bytes())]
    if not rows:
        raise UserError(f"{path} holds no rows; give the folder that launch.benchmark wrote to")
    return rows


def _lines(path: Path, data: bytes) -> list[tuple[Row, int]]:
    """Every row with the byte behind it."""
    found, end = [], 0
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        end += len(line) + 1
        try:
            row = json.loads(line)
            row["index"], row["method"], row["prompt_digest"]  # what every row has
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number} is no row of a benchmark ({error}); move the file away") from None
        found.append((row, end))
    return found


class RecordFile:
    """A file of rows that one process at a time extends.

    Args:
        path: made if it is not there, with its folder; a torn tail, or a last prompt without all methods, is cut off.
        methods: that every prompt has a row of.

    Raises:
        ValueError: another process has the file open, it cannot be written, or it holds something else.
    """

    def __init__(self, path: Path, methods: Sequence[str]) -> None:
        self.path, self._methods = path, list(methods)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+")
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); give another out=") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UserError(f"{path} is being written by another run; wait for it, or give another out=") from None
        self._file.seek(0)
        self.rows = self._whole(_lines(path, self._file.read()))

    def _whole(self, lines: list[tuple[Row, int]]) -> list[Row]:
        """The rows of finished prompts; the rest is cut off the file."""
        step, keep = len(self._methods), len(lines) // len(self._methods) * len(self._methods)
        for first in range(0, keep, step):
            block = [row for row, _ in lines[first : first + step]]
            if [row["method"] for row in block] != self._methods or len({row["index"] for row in block}) > 1:
                raise UserError(f"{self.path} holds rows of other methods; move it away, or give another out=")
        self._file.truncate(lines[keep - 1][1] if keep else 0)
        return [row for row, _ in lines[:keep]]

    @property
    def done(self) -> dict[int, str]:
        """The digest of every finished prompt by its index."""
        return {row["index"]: row["prompt_digest"] for row in self.rows}

    def append(self, rows: Iterable[Row]) -> None:
        """Add one prompt's rows, which are on the disk when this returns."""
        added = list(rows)
        assert [row["method"] for row in added] == self._methods, "a prompt's rows are written together"
        self._file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in added).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows += added

    def close(self) -> None:
        """Let another process have it."""
        self._file.close()
