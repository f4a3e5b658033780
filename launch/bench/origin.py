"""Origin of a record, so that others can measure it again: command, commit, versions and machine."""

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
    """The command of this run and the commit of the code, by name: "command" and "commit"; None for an unknown one."""
    return {"command": command(), "commit": commit()}


def command() -> str | None:
    """The command line that runs this job again, with all its overrides; None outside a Hydra app."""
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
    """Short hash of the commit that a clone is at, as in "8cbffdbe" or, with changed files, "8cbffdbe-dirty".

    Args:
        root: folder of the clone.

    Returns:
        The hash; None for a folder that is no git clone, such as that of an installed wheel, or where git fails.
    """
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def hardware(context: lp.ParallelContext) -> str:
    """The run's hardware in words: number of ranks and GPU, as in "2 x NVIDIA H100", or on a CPU "8 x86-64 cores".

    Args:
        context: this rank's context, from which device and world size are taken.
    """
    if context.device.type == "cuda":
        return f"{context.world_size} x {torch.cuda.get_device_name(context.device)}"
    return f"{os.cpu_count()} {platform.machine().replace('_', '-')} cores"


def versions() -> dict[str, str]:
    """Versions of lp, Python and the packages on which measurements depend, by name."""
    return {"lp": lp.__version__, "python": platform.python_version()} | {name: version(name) for name in VERSIONS}
