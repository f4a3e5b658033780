"""The files of a folder that a repository would keep: what .gitignore names is left out, and so is what is no text."""

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
    """A file of a folder.

    Attributes:
        path: relative to the folder.
        size: bytes.
        modified_ns: when it was last changed.
    """

    path: str
    size: int
    modified_ns: int


def source_files(folder: Path, needs_git: bool = False) -> list[SourceFile]:
    """The files in a folder and those below it, by path; without those that .gitignore leaves out, and links.

    Repositories in it, submodules among them, are listed each by its own .gitignore. Where git fails, .gitignore is not
    read, with a warning.

    Args:
        folder: whose files are listed.
        needs_git: refuse to list them where git fails.

    Raises:
        ValueError: no such folder; or git is needed, and fails.
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
    """Refuse what is no folder.

    Raises:
        ValueError: it is none.
    """
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is no folder; give one with the files to read")


def text_of(path: Path) -> str | None:
    """The text in a file; None for a binary file, or one that is not UTF-8."""
    data = path.read_bytes()
    if b"\0" in data[:BEGINNING]:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _paths(folder: Path, needs_git: bool) -> Iterator[str]:
    """Paths as git lists them: of its repository; outside one, or where it leaves the folder out, as if it were one."""
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
