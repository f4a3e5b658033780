"""What a user of this installation can type: messages name no file and no command that is not there.

A clone has `torchrun.sh`, `scripts/` and `docs/`; an installed package has the command `lp`.
"""

from __future__ import annotations

from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent


def in_clone() -> bool:
    """Whether this code runs from a clone of the repository."""
    return (CLONE / "torchrun.sh").is_file()


def app_command(app: str) -> str:
    """What starts an app."""
    return f"bash torchrun.sh launch.{app}" if in_clone() else f"lp {app}"


def module_command(module: str) -> str:
    """What runs a module of the apps' package, as "bench.tables"."""
    return f"python -m {'launch' if in_clone() else 'lp.launch'}.{module}"


def install_command(extra: str) -> str:
    """What installs an extra."""
    return f"pip install '{'.' if in_clone() else 'lp-runtime'}[{extra}]'"
