"""Keeps lp's compiled functions on disk; a background process compiles them once after an install.

Compiling all of lp's functions by numba takes about a minute, too long to wait for before a first token. Until they
are compiled, a process runs the same functions as plain Python, which gives the same bits and makes a step some
milliseconds longer.

With `LP_COMPILE=now` a process compiles each function at its first call: for tests, and for the background process.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

logger = logging.getLogger(__name__)
SETTING, NOW = "LP_COMPILE", "now"
NUMBA_CACHE = "NUMBA_CACHE_DIR"  # numba's own variable: its cache folder
DISABLED = "NUMBA_DISABLE_JIT"  # numba's own variable: 1 switches it off


def is_wanted() -> bool:
    """Whether lp's functions should be compiled by numba: numba is installed, and NUMBA_DISABLE_JIT is not set."""
    try:
        version("numba")
    except PackageNotFoundError:
        return False
    return os.environ.get(DISABLED, "0") in ("", "0")


def runs_compiled() -> bool:
    """Whether functions that this process imports from now on run as code compiled by numba, not as Python."""
    return is_wanted() and (os.environ.get(SETTING) == NOW or is_complete())


def why_not_compiled() -> str:
    """Why lp's functions run as plain Python here, as a sentence for a run's report; call it only if they do."""
    if not is_wanted():
        return "numba, which compiles lp's functions, is not installed or switched off"
    if cache_folder() is None:
        return "lp's functions are not compiled, as no folder can be written that would keep them"
    return "lp's functions are being compiled in the background, once after an install, for the next run"


def is_complete() -> bool:
    """Whether the cache folder has all functions, compiled for this processor, this Python and this numba."""
    folder = cache_folder()
    return folder is not None and _mark(folder).exists()


def mark_complete() -> None:
    """Note in the cache folder that all functions are compiled, so that later processes use the compiled code."""
    if folder := cache_folder():
        _mark(folder).touch()


def complete() -> None:
    """Compile the functions that are missing in the cache, and wait for that, about a minute.

    Call it before something is measured or served, and before lp's functions are imported.
    """
    if os.environ.get(SETTING) != NOW and is_wanted() and cache_folder() and not is_complete():
        with suppress(OSError):  # no process can be made: functions run as Python
            _start().wait()


def imported_too_early() -> bool:
    """Whether this process runs functions as plain Python because it imported them before they were compiled."""
    module = sys.modules.get("lp.compiled")
    return module is not None and not module.COMPILED and runs_compiled()


@functools.cache
def complete_in_background() -> None:
    """Start a process with the lowest priority that compiles the missing functions; it may outlive this process."""
    if os.environ.get(SETTING) != NOW and is_wanted() and cache_folder() and not is_complete():
        with suppress(OSError):  # no process can be made: functions go on as Python
            _start(nice=19)
            logger.info("lp's functions are being compiled in the background, once after an install")


def _start(nice: int = 0) -> subprocess.Popen[bytes]:
    package = Path(__file__).parent
    paths = [str(package.parent), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        SETTING: NOW,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "lp.compile_functions", str(nice)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@functools.cache
def cache_folder() -> Path | None:
    """Folder that keeps the compiled code for these sources of lp; None if no folder can be written."""
    name = f"compiled-{sources_digest()}"
    for parent in _cache_parents():
        folder = parent / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:  # an installed package may be read-only
            continue
        if os.access(folder, os.W_OK):
            return folder
    return None


def _cache_parents() -> Iterator[Path]:
    """Folders to try: numba's own setting alone if there is one, else this package's, then the user's cache folder."""
    if given := os.environ.get(NUMBA_CACHE):
        yield Path(given)
        return
    yield Path(__file__).parent / "__pycache__"
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if user.is_absolute():  # else there is no home, and "~" would be a folder right here
        yield user / "lp"


@functools.cache
def sources_digest() -> str:
    """Digest of the sources that are compiled, for the name of the cache folder: 16 hexadecimal digits.

    It covers files with compiled functions, and files that these import, since constants are compiled in.
    """
    package = Path(__file__).parent
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    compiled = {path for path, source in sources.items() if "jit" in source}
    modules = {module for path in compiled for module in re.findall(r"^from lp\.([\w.]+) import", sources[path], re.M)}
    used = compiled | {package.joinpath(*module.split(".")).with_suffix(".py") for module in modules}
    text = "".join(source for path, source in sources.items() if path in used)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _mark(folder: Path) -> Path:
    """The file whose existence says that all is compiled, for this processor, Python and release of numba."""
    from llvmlite.binding import get_host_cpu_name

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return folder / f"complete-{version('numba')}-{python}-{get_host_cpu_name()}"
