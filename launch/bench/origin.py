"""Where a record comes from: the command that measured it, the commit of the code, versions and the machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig

import lp
from lp.commands import in_clone

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("torch", "transformers", "tokenizers", "numpy")


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


def hardware(context: lp.ParallelContext) -> str:
    """The machine of rank 0 in words."""
    if context.device.type == "cuda":
        return f"{context.world_size} x {torch.cuda.get_device_name(context.device)}"
    return f"{os.cpu_count()} {platform.machine().replace('_', '-')} cores"


def versions() -> dict[str, str]:
    """Versions of the packages that figures depend on."""
    return {"lp": lp.__version__, "python": platform.python_version()} | {name: version(name) for name in VERSIONS}
