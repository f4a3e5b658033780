"""Shell commands that messages tell a user to run, worded so that they work from the user's installation and folder.

A clone of the repository has `torchrun.sh`, `scripts/` and `docs/`. An installed package has the command `lp`, if its
environment is active.
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
    """The shell command that starts one of lp's apps, such as "lp generate" or "bash torchrun.sh launch.generate".

    Args:
        app: name of the app, such as "generate".
    """
    if _lp_is_found():
        return f"lp {app}"
    if in_clone():
        return f"bash {_of_clone('torchrun.sh')} launch.{app}"
    return f"{shlex.quote(sys.executable)} -m lp {app}"


def module_command(module: str) -> str:
    """The shell command that runs a module of lp's package `launch`, such as "python -m launch.bench.report".

    Args:
        module: name of the module within that package, such as "bench.report".
    """
    if not in_clone():
        return f"python -m lp.launch.{module}"
    elsewhere = "" if _in_clone_folder() else f"PYTHONPATH={shlex.quote(str(CLONE))} "
    return f"{elsewhere}python -m launch.{module}"


def install_command(extra: str) -> str:
    """The shell command that installs one of lp's groups of optional packages, such as "pip install '.[gguf]'".

    Args:
        extra: name of the group (an extra in pyproject.toml), such as "gguf".
    """
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
    """Path of a file of the clone, quoted for a shell: relative in the clone's folder, else absolute."""
    return name if _in_clone_folder() else shlex.quote(str(CLONE / name))
