"""Watch a folder whose files are edited, and tell which of them have changed since the last look.

The operating system reports edits, by the package watchfiles, in the folders in which git lists files and in no others.
After a new file, a new folder or a changed .gitignore the files are listed anew. They are listed every five seconds in
any case: network file systems do not report what other machines write, and where too many reports come at once some are
lost.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path, PurePath

from watchfiles import Change
from watchfiles._rust_notify import (
    RustNotify,
    WatchfilesRustInternalError,
)  # documented; watchfiles.watch() would begin to listen at its first result

from lp.errors import UserError

from .source_files import SourceFile, source_files

STEP_MS = 10  # reports are handed over once none has come for so long
STORM_MS = 500  # or so long after the first, at the latest
LIST_S = 5  # until files are listed anew, at the latest
LIST_SHARE = 0.1  # of the time goes to listing, at most
LISTINGS = 3  # at a time, where folders come meanwhile


class WatchedFolder:
    """Tells which files in a folder and its subfolders have changed since the last look.

    Args:
        folder: the folder, of which all files that `source_files` lists are watched.
        leaves_out: takes a path relative to the folder, and returns whether that file is left out.

    Attributes:
        files: all watched files by path, as they were at the last look.

    Raises:
        ValueError: no such folder, or git does not list its files.
    """

    def __init__(self, folder: Path, leaves_out: Callable[[str], bool]) -> None:
        self.folder = folder
        self.files: dict[str, SourceFile] = {}
        self._place = folder.resolve()
        self._leaves_out = leaves_out
        self._has_git = shutil.which("git") is not None
        self._names: set[str] = set()  # of files, as they were listed last
        self._folders: set[str] = set()  # whose edits the system reports; empty: it has to be asked anew
        self._notices: RustNotify | None = None
        self._list_from_s = self._list_by_s = 0.0  # when they may be listed anew, and when they must be
        self._list()

    def look(self, wait_s: float = 0) -> set[str]:
        """Paths of files that have changed, come or gone since the last look.

        Args:
            wait_s: most seconds to wait for a change.

        Raises:
            ValueError: the folder no longer exists.
        """
        changed = set[str]()
        for change, place in self._told(min(wait_s, max(self._list_by_s - time.monotonic(), 0))):
            path = os.path.relpath(place, self._place)
            asks = os.path.basename(path) == ".gitignore"
            if path in self._names:
                file = self._file(path)
                if file != self.files.pop(path, None):
                    changed.add(path)
                if file is not None:
                    self.files[path] = file
            elif path in self._folders and change != Change.modified:
                self._folders, asks = set(), True  # a folder that was made anew is not reported until asked for
            elif change == Change.added and not self._leaves_out(path):
                asks = asks or os.path.lexists(place)  # an editor's temporary file has been renamed by now
            if asks:
                self._list_by_s = self._list_from_s
        return changed | self._list() if time.monotonic() >= self._list_by_s else changed

    def _told(self, wait_s: float) -> set[tuple[int, str]]:
        """Wait for reports of edits; kinds and absolute paths of what has changed."""
        if self._notices is None:
            time.sleep(wait_s)
            return set()
        try:
            told = self._notices.watch(STORM_MS, STEP_MS, max(round(1000 * wait_s), 1), None)
        except WatchfilesRustInternalError:  # a file name that is not UTF-8, after which it reports nothing more
            self._folders, self._notices, self._list_by_s = set(), None, self._list_from_s
            return set()
        if told == "signal":
            raise KeyboardInterrupt
        return set() if isinstance(told, str) else told

    def _file(self, path: str) -> SourceFile | None:
        try:
            found = os.lstat(os.path.join(self._place, path))
        except OSError:
            return None
        return SourceFile(path, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None

    def _list(self) -> set[str]:
        """List all files anew; paths of those that differ from what was known.

        Raises:
            ValueError: the folder is there no more; or git fails at the first listing.
        """
        began_s, before = time.monotonic(), self.files
        try:
            for _ in range(LISTINGS):
                listed = source_files(self.folder, needs_git=self._has_git)
                files = {file.path: file for file in listed if not self._leaves_out(file.path)}
                places = {PurePath(place) for place in {os.path.dirname(path) for path in files} | {""}}
                folders = {str(each) for place in places for each in (place, *place.parents)}
                if folders == self._folders:
                    break
                self._ask(folders)  # and list again: files may have come before the system began to report
            self.files, self._names = files, set(files)
        except UserError as error:  # what git leaves out must not be read for that
            if not self._list_by_s or not self.folder.is_dir():
                raise
            warnings.warn(f"{error}; until then new files are not found", stacklevel=2)
        self._list_from_s = time.monotonic() + (time.monotonic() - began_s) / LIST_SHARE
        self._list_by_s = max(self._list_from_s, time.monotonic() + LIST_S)
        now = self.files
        return {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)}

    def _ask(self, folders: set[str]) -> None:
        """Ask the system to report edits in these folders."""
        self._folders, self._notices = folders, None
        try:
            self._notices = RustNotify([str(self._place / each) for each in folders], False, False, 0, False, False)
        except FileNotFoundError:  # one is gone meanwhile
            self._folders = set()
        except (OSError, ValueError, WatchfilesRustInternalError) as error:
            warnings.warn(
                f"the system reports no edits in {str(self.folder)!r} ({error}): they are found up to {LIST_S} s late; "
                f"fs.inotify.max_user_watches must be {len(folders):,} or more, and fs.inotify.max_user_instances "
                "above what others use: raise them by sysctl, and start anew",
                stacklevel=2,
            )
