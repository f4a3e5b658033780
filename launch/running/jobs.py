"""Run jobs on several ranks of this machine, and continue a sweep after a job has failed."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lp.checks import check_int
from lp.errors import UserError

from .. import PACKAGE
from ..config.arguments import quoted
from .errors import INTERRUPTED, READER_LEFT
from .once import print_once, rank

OBJECTIVE = "LP_OBJECTIVE"  # names the file in which a launch leaves what its task returned
OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FAILED = "failed"  # the folder of a sweep with a file for every failed job
FAILED_OBJECTIVE = 0.0  # what a sweeper gets for a failed job


def leave_objective(value: float | None) -> float | None:
    """Hand a task's result to the process that launched these ranks, which gives it to a sweep's optimiser.

    Rank 0 writes it to a file that the launching process has named.

    Args:
        value: the task's result; None: there is nothing to hand over.

    Returns:
        `value`, unchanged.
    """
    if value is not None and (path := os.environ.get(OBJECTIVE)) and rank() == 0:
        Path(path).write_text(repr(value))
    return value


def relaunch(
    nproc: int, app: str | None = None, instead: Sequence[str] | None = None, place: Sequence[str] = ("--standalone",)
) -> float | None:
    """Run this job on several ranks of this machine, by torchrun, and return the result of rank 0's task.

    Args:
        nproc: number of ranks to launch.
        app: name of another app to run, such as "benchmark"; None: this one.
        instead: overrides to give to the app; None: those of this job.
        place: torchrun's options that say which machines take part: this one alone, or others too.

    Returns:
        The result; None if the task returned nothing.

    Raises:
        SystemExit: the exit code of the ranks, if it is not 0.
        UserError: `parallel.nproc` is out of range, or is given under torchrun.
    """
    check_int("parallel.nproc", nproc, 1, float("inf"), "or null, to run in this process")
    if "WORLD_SIZE" in os.environ:
        raise UserError(f"parallel.nproc is {nproc} in a launch of {os.environ['WORLD_SIZE']} ranks; leave one out")
    hydra = HydraConfig.get()
    overrides = hydra.overrides.task if instead is None else instead
    torchrun = [sys.executable, "-m", f"{PACKAGE}.torchrun", *place, "--nproc-per-node", str(nproc)]
    cli = ["-m", f"{PACKAGE}.cli", app or str(hydra.job.config_name)]
    kept = {key: value for key, value in os.environ.items() if key not in (*OF_A_LAUNCH, "HYDRA_FULL_ERROR")}
    with tempfile.TemporaryDirectory(prefix="lp-") as folder:
        objective = Path(folder) / "objective"
        env = {**kept, OBJECTIVE: str(objective), "LP_RUN_DIR": str(folder_of_run()), **_import_path()}
        command = [*torchrun, *cli, *overrides, "parallel.nproc=null", "hydra.mode=RUN"]
        code = subprocess.run(command, env=env, check=False).returncode
        if code:
            raise SystemExit(code if code > 0 else 128 - code)
        return float(objective.read_text()) if objective.exists() else None


def _import_path() -> dict[str, str]:
    """PYTHONPATH for launched ranks, so that they find the apps of a clone; {} for installed apps, which need none."""
    if PACKAGE != "launch":
        return {}
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def folder_of_run() -> Path:
    """The folder that this run writes to: the one that Hydra made, or in a sweep the one that all its jobs share."""
    hydra = HydraConfig.get()
    return Path(hydra.sweep.dir if hydra.mode == RunMode.MULTIRUN else hydra.runtime.output_dir).absolute()


def goes_on(folder: Path) -> str:
    """The line that a long run prints at its start: where its records are, and how to continue after an interruption.

    Args:
        folder: the folder of the records.
    """
    return f"records: {folder}; if this is interrupted, the same command with {out_override(folder)} goes on"


def out_override(folder: Path) -> str:
    """The override out=FOLDER as it is typed into a shell: quoted for the shell and for Hydra, where that is needed.

    Args:
        folder: the folder of the records.
    """
    path = str(folder)
    is_plain = re.fullmatch(r"[\w./@%+-]+( [\w./@%+-]+)*", path, re.ASCII)  # to Hydra
    return f"out={shlex.quote(path if is_plain else quoted(path))}"


def surviving(job: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """Wrap a job so that, in a sweep, its failure is noted in a file and the sweep continues with the next job.

    Ctrl-C still ends the sweep, and so does a failure that cannot be written down.

    Args:
        job: runs one job with its config.
    """

    @functools.wraps(job)
    def survived(cfg: DictConfig) -> Any:
        if HydraConfig.get().mode != RunMode.MULTIRUN:
            return job(cfg)
        try:
            return job(cfg)
        except SystemExit as end:
            if end.code in (None, 0, INTERRUPTED, READER_LEFT):
                raise
            code = end.code if isinstance(end.code, int) else 1
        except Exception:
            traceback.print_exc()
            code = 1
        hydra = HydraConfig.get()
        note = folder_of_run() / FAILED / f"{hydra.job.num}-{code}.txt"
        try:
            note.parent.mkdir(exist_ok=True)
            note.write_text(hydra.job.override_dirname)
        except OSError as error:  # nor could the jobs behind it write
            reason = f"cannot write {note} ({error.strerror}); give another folder as hydra.sweep.dir="
            print_once(f"the sweep ends here: {reason}")
            raise SystemExit(code) from None
        return FAILED_OBJECTIVE

    return survived


def failed_jobs(folder: Path) -> list[Path]:
    """Files in a sweep's folder that `surviving` wrote, one for each failed job, with the job's overrides.

    Args:
        folder: the folder that the sweep's jobs share.
    """
    return [note for note in (folder / FAILED).glob("*.txt") if re.fullmatch(r"[0-9]+-[0-9]+", note.stem)]
