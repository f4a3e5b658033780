"""Where a record comes from: the command that measured it, and the commit of the code."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from lp.commands import in_clone

ROOT = Path(__file__).resolve().parents[2]


def origin() -> dict[str, str | None]:
    """`command` and `commit` of this run; None for what is not known, as the commit of an installed wheel."""
    return {"command": command(), "commit": commit()}


def command() -> str | None:
    """What runs this job again, with all its overrides; None outside of a Hydra app."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    ranks = os.environ.get("WORLD_SIZE", "1")
    app = str(hydra.job.config_name)
    arguments = shlex.join([app, *hydra.overrides.task])
    if ranks == "1":
        return f"lp {arguments}"
    if in_clone():
        return f"NPROC={ranks} bash torchrun.sh launch.{arguments}"
    return f"torchrun --nproc-per-node {ranks} -m lp {arguments}"


def commit(root: Path = ROOT) -> str | None:
    """Short hash of the clone in `root`, with `-dirty` where its files were changed; None for what is no clone."""
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
