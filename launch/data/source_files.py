"""List the source files of a folder as a git repository would keep them, without files that .gitignore names."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lp.errors import UserError

BEGINNING = 8192  # bytes in which a binary file has a zero, as git has it


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a folder, with the size and time by which a later listing tells whether it has changed.

    Attributes:
        path: path relative to the folder.
        size: bytes.
        modified_ns: time of the last change, in nanoseconds since the epoch.
    """

    path: str
    size: int
    modified_ns: int


def source_files(folder: Path, needs_git: bool = False) -> list[SourceFile]:
    """List the files in a folder and its subfolders, sorted by path, without links and files that .gitignore names.

    A repository inside the folder, such as a submodule, is listed by its own .gitignore. Where git fails, a warning
    says so, .gitignore is not read, and hidden files are left out.

    Args:
        folder: the folder to list.
        needs_git: raise an error where git fails, instead of the warning.

    Raises:
        ValueError: no such folder; or `needs_git`, and git fails.
    """
    check_folder(folder)
    found = []
    for path in sorted(set(_paths(folder, needs_git))):
        place = os.path.join(folder, path)
        try:
            state = os.lstat(place)
        except OSError:
            continue
        if stat.S_ISDIR(state.st_mode):  # git names a repository in another one, and not its files
            inner = source_files(Path(place), needs_git)
            found += [replace(file, path=os.path.join(path, file.path)) for file in inner]
        elif stat.S_ISREG(state.st_mode):
            found.append(SourceFile(path, state.st_size, state.st_mtime_ns))
    return found


def check_folder(folder: Path) -> None:
    """Refuse a path that is not a folder.

    Raises:
        ValueError: names the path.
    """
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is no folder; give one with the files to read")


def text_of(path: Path) -> str | None:
    """The text of a UTF-8 file; None for a binary file or another encoding.

    Raises:
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    if b"\0" in data[:BEGINNING]:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _paths(folder: Path, needs_git: bool) -> Iterator[str]:
    """Paths as `git ls-files` lists them, tracked and untracked ones, without those that .gitignore names.

    Outside a repository, or in a folder that the repository ignores, git lists the folder as if it were a new
    repository.
    """
    git, listing = ["git", "-C", str(folder)], ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        ran = subprocess.run([*git, *listing], capture_output=True)
        if ran.returncode or subprocess.run([*git, "check-ignore", "-q", "."], capture_output=True).returncode == 0:
            with tempfile.TemporaryDirectory() as empty:
                subprocess.run(["git", "init", "-q", empty], capture_output=True, check=True)
                place = [f"--git-dir={empty}/.git", f"--work-tree={folder.absolute()}"]
                ran = subprocess.run([*git, *place, *listing], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if needs_git:
            failed = f"git did not list the files of {str(folder)!r} ({error})"
            raise UserError(f"{failed}; see what `git ls-files` says there") from None
        warnings.warn(f"git did not list the files of {folder} ({error}): .gitignore is not read", stacklevel=4)
        files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        yield from (str(path) for path in files if not any(part.startswith(".") for part in path.parts))
        return
    yield from ran.stdout.decode(errors="surrogateescape").split("\0")[:-1]
