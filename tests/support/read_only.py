"""A disk that becomes read-only: from some write on, nothing in a folder is opened, made, moved or removed.

What is open already can be written.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PATHS = {"os.rename": slice(0, 2), "os.link": slice(0, 2), "os.symlink": slice(1, 2)}  # among an event's arguments
EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate")


class ReadOnlyFolder:
    """A folder in which, from some write on, nothing is opened for writing, made, moved or removed.

    Python's audit events tell of every file that Python opens, whichever library asks for it; what a library
    opens without Python, as safetensors does, is told by the rename that follows.

    Args:
        folder: and all that is below it.
        after: writes that are still taken.

    Attributes:
        writes: events so far, refused ones among them.
    """

    def __init__(self, folder: Path, after: int) -> None:
        self._folder = os.path.realpath(folder)
        self._after = after
        self.writes = 0

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        """Refuse an event.

        Raises:
            OSError: EROFS.
        """
        for path in args[PATHS.get(event, slice(0, 1))]:
            if isinstance(path, str | bytes | os.PathLike) and self._is_below(os.fsdecode(path)):
                self.writes += 1
                if self.writes > self._after:
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fsdecode(path))
                return

    def _is_below(self, path: str) -> bool:
        return os.path.abspath(path).startswith(self._folder + os.sep)


@functools.cache
def _active() -> list[ReadOnlyFolder]:
    """Folders that are watched; the hook stays for as long as the process."""
    active: list[ReadOnlyFolder] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if active and (event in EVENTS or (event == "open" and args[2] & WRITES)):
            for folder in active:
                folder.see(event, args)

    sys.addaudithook(hook)
    return active


@contextmanager
def read_only(folder: Path, after: int) -> Iterator[ReadOnlyFolder]:
    """A folder that takes so many writes within the block, and then none."""
    watched = ReadOnlyFolder(folder, after)
    _active().append(watched)
    try:
        yield watched
    finally:
        _active().remove(watched)
