"""Jobs, each in a folder of its run: launched on ranks of their own, and in a sweep outliving each other's failures."""

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
from .errors import INTERRUPTED, READER_LEFT
from .once import print_once, rank

OBJECTIVE = "LP_OBJECTIVE"  # names the file in which a launch leaves what its task returned
OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FAILED = "failed"  # the folder of a sweep with a file for every failed job
FAILED_OBJECTIVE = 0.0  # what a sweeper gets for a failed job


def leave_objective(value: float | None) -> float | None:
    """Write what a task returned to the file of the process that launched this one, if there is one."""
    if value is not None and (path := os.environ.get(OBJECTIVE)) and rank() == 0:
        Path(path).write_text(repr(value))
    return value


def relaunch(
    nproc: int, app: str | None = None, instead: Sequence[str] | None = None, place: Sequence[str] = ("--standalone",)
) -> float | None:
    """Run this job once more, on so many ranks of this machine, and return what rank 0 returned.

    Args:
        nproc: ranks.
        app: another app of launch/; None is this one.
        instead: its overrides; None takes this job's.
        place: torchrun's options for ranks that have others on other machines.

    Raises:
        SystemExit: the exit code of the ranks, if it is not 0.
        UserError: `parallel.nproc` is out of range, or ranks would launch ranks.
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
    """PYTHONPATH with the clone in front, whose apps need not be installed; installed apps need nothing."""
    if PACKAGE != "launch":
        return {}
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def folder_of_run() -> Path:
    """Where this run writes: the folder that Hydra made, or of a sweep the one that its jobs share."""
    hydra = HydraConfig.get()
    return Path(hydra.sweep.dir if hydra.mode == RunMode.MULTIRUN else hydra.runtime.output_dir).absolute()


def goes_on(folder: Path) -> str:
    """How a run goes on that is killed; said before it is."""
    return f"records: {folder}; if this is interrupted, the same command with out={shlex.quote(str(folder))} goes on"


def surviving(job: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """The job; in a sweep, its failure is noted and the next one runs.

    Ctrl-C ends the sweep, and so does a failure that cannot be noted.
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
    """Notes of failed jobs in a sweep's folder, where others may have files too."""
    return [note for note in (folder / FAILED).glob("*.txt") if re.fullmatch(r"[0-9]+-[0-9]+", note.stem)]
