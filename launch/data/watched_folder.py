"""A folder whose files are edited: which of them have changed since one looked last.

No notice of the system is needed, so this works on every file system, and what it costs does not grow with the folder.
Files and their folders are looked at in turn, for a tenth of the time; what changed last is looked at each time. A
folder that has changed has a file more or less: then the files are listed anew, as git has them.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from lp.errors import UserError

from .source_files import SourceFile, source_files

State = tuple[int, int] | None  # size and time of a file; 0 and the time of a folder; None: neither is there
BUSY_S = 60  # for so long after a change, the next one is looked for often
PAUSE_S, IDLE_PAUSE_S = 0.02, 0.2  # between two looks, in that time and later
SHARE, IDLE_SHARE = 0.1, 0.02  # of the time goes to looking
RECENT = 16  # files and folders that changed last
LIST_S = 5  # until files are listed anew at the latest: a folder that had no file has no place among those looked at
LIST_SHARE = 0.1  # of the time goes to listing, at most
LISTINGS = 3  # at a time, where folders come meanwhile


class WatchedFolder:
    """Says what has changed.

    Args:
        folder: whose files are watched, and those below it, as `source_files` lists them.
        leaves_out: says of a path whether it is left out.

    Attributes:
        files: all of them, by path, as they were when they were looked at last.

    Raises:
        ValueError: no such folder, or git does not list its files.
    """

    def __init__(self, folder: Path, leaves_out: Callable[[str], bool]) -> None:
        self.folder = folder
        self.files: dict[str, SourceFile] = {}
        self._leaves_out = leaves_out
        self._folders: set[str] = set()  # that have files
        self._states: dict[str, State] = {}  # of files and folders, by path
        self._turns: list[str] = []  # the same paths
        self._turn = 0
        self._recent: list[str] = []
        self._changed_s = time.monotonic()
        self._list_from_s = self._list_by_s = 0.0  # when they may be listed anew, and when they must be
        self._has_git = shutil.which("git") is not None
        self._list()

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look."""
        return PAUSE_S if self._is_busy else IDLE_PAUSE_S

    @property
    def _is_busy(self) -> bool:
        return time.monotonic() < self._changed_s + BUSY_S

    def look(self) -> set[str]:
        """Paths of files that have changed, come or gone since they were looked at last."""
        until = time.monotonic() + self.pause_s * (SHARE if self._is_busy else IDLE_SHARE)
        found = {path for path in self._recent if path in self._states and self._has_changed(path)}
        for _ in self._turns:
            if time.monotonic() > until:
                break
            self._turn = (self._turn + 1) % len(self._turns)
            if self._has_changed(self._turns[self._turn]):
                found.add(self._turns[self._turn])
        files = {path for path in found if path in self.files}
        if len(files) < len(found) or any(os.path.basename(path) == ".gitignore" for path in files):
            self._list_by_s = self._list_from_s
        for path in files:
            state = self._states[path]
            if state is None:
                del self.files[path]
            else:
                self.files[path] = SourceFile(path, *state)
        if time.monotonic() >= self._list_by_s:
            files |= self._list()
        if files:
            self._changed_s = time.monotonic()
            places = [place for path in files for place in (path, os.path.dirname(path))]
            self._recent = [*dict.fromkeys([*places, *self._recent])][:RECENT]
        return files

    def _has_changed(self, path: str) -> bool:
        state = self._state(path)
        changed = state != self._states.get(path)
        self._states[path] = state
        return changed

    def _state(self, path: str) -> State:
        try:
            found = os.lstat(os.path.join(self.folder, path))
        except OSError:
            return None
        if stat.S_ISDIR(found.st_mode):
            return 0, found.st_mtime_ns
        return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None

    def _list(self) -> set[str]:
        """List all files anew; paths of those that differ from what was known.

        Raises:
            ValueError: the folder is there no more; or git fails at the first listing.
        """
        began_s = time.monotonic()
        before, folders = self.files, self._folders
        try:
            for _ in range(LISTINGS):
                states = {folder: self._state(folder) for folder in folders}  # before: what comes later shows
                listed = source_files(self.folder, needs_git=self._has_git)
                files = [file for file in listed if not self._leaves_out(file.path)]
                folders = {os.path.dirname(file.path) for file in files}
                if folders <= states.keys():
                    break
        except UserError as error:  # what git leaves out must not be read for that
            if not self._turns or not self.folder.is_dir():
                raise
            warnings.warn(f"{error}; until then new files are not found", stacklevel=2)
            self._plan_listing(began_s)
            return set()
        self.files, self._folders = {file.path: file for file in files}, folders
        self._states = {file.path: (file.size, file.modified_ns) for file in files}
        self._states |= {folder: states.get(folder) for folder in folders}
        self._turns = [*self._states]
        self._plan_listing(began_s)
        return {path for path in before.keys() | self.files.keys() if before.get(path) != self.files.get(path)}

    def _plan_listing(self, began_s: float) -> None:
        """Say when files are listed again, by how long it took."""
        self._list_from_s = time.monotonic() + (time.monotonic() - began_s) / LIST_SHARE
        self._list_by_s = max(self._list_from_s, time.monotonic() + LIST_S)
