"""What the user of this installation can type, where they are: messages name no file and no command that is not there.

A clone has `torchrun.sh`, `scripts/` and `docs/`; an installed package has the command `lp`, where its environment is
active.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent


def in_clone() -> bool:
    """Whether this code runs from a clone of the repository."""
    return (CLONE / "torchrun.sh").is_file()


def app_command(app: str) -> str:
    """What starts an app."""
    if _lp_is_found():
        return f"lp {app}"
    if in_clone():
        return f"bash {_of_clone('torchrun.sh')} launch.{app}"
    return f"{shlex.quote(sys.executable)} -m lp {app}"


def module_command(module: str) -> str:
    """What runs a module of the apps' package, as "bench.report"."""
    if not in_clone():
        return f"python -m lp.launch.{module}"
    elsewhere = "" if _in_clone_folder() else f"PYTHONPATH={shlex.quote(str(CLONE))} "
    return f"{elsewhere}python -m launch.{module}"


def install_command(extra: str) -> str:
    """What installs an extra."""
    source = ("." if _in_clone_folder() else str(CLONE)) if in_clone() else "lp-runtime"
    return f"pip install {shlex.quote(f'{source}[{extra}]')}"


def _lp_is_found() -> bool:
    """Whether a shell finds the command `lp`, and it is this environment's."""
    found = shutil.which("lp")
    return found is not None and Path(found).absolute().parent == Path(sys.executable).absolute().parent


def _in_clone_folder() -> bool:
    """Whether the current folder is the clone."""
    return Path.cwd() == CLONE


def _of_clone(name: str) -> str:
    """A file of the clone, as a shell takes it."""
    return name if _in_clone_folder() else shlex.quote(str(CLONE / name))
