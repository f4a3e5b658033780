"""Jobs of a sweep: each may launch ranks of its own; one that fails is listed at the end, and the others run."""

from __future__ import annotations

import functools
import math
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
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from lp.checks import check_int
from lp.errors import UserError

from .errors import INTERRUPTED, READER_LEFT, USER_ERROR, reported
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
    torchrun = [sys.executable, "-m", f"{__package__}.torchrun", *place, "--nproc-per-node", str(nproc)]
    cli = ["-m", f"{__package__}.cli", app or str(hydra.job.config_name)]
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
    if __package__ != "launch":
        return {}
    root = str(Path(__file__).resolve().parent.parent)
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


def count_jobs(config: DictConfig) -> int | None:
    """How many jobs a sweep has, by Hydra's own sweeper or Optuna's; None where that cannot be known."""
    sweeper = config.hydra.sweeper
    if "n_trials" in sweeper:
        return int(sweeper.n_trials)
    params = [f"{key}={values}" for key, values in (sweeper.get("params") or {}).items()]
    overrides = OverridesParser.create().parse_overrides([*params, *config.hydra.overrides.task])
    last_of_key = {override.get_key_element(): override for override in overrides}
    swept = [override for override in last_of_key.values() if override.is_sweep_override()]
    if not all(override.is_choice_sweep() or override.is_range_sweep() for override in swept):
        return None  # a glob, which only the sweeper can expand
    return math.prod(sum(1 for _ in override.sweep_iterator()) for override in swept)


class SweepEnd(Callback):
    """Announces the jobs of a sweep, lists at its end those that failed, and ends the process with their exit code.

    Args:
        report: whether the jobs wrote records of a benchmark, to be shown together.
    """

    def __init__(self, report: bool = False) -> None:
        self.report = report
        self.jobs: int | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the first job: those that failed when the same folder was swept before are run again."""
        self.jobs = count_jobs(config)
        if self.report and config.get("out") is None and rank() == 0:
            print(goes_on(Path(config.hydra.sweep.dir).absolute()), file=sys.stderr, flush=True)
        for note in _notes(Path(config.hydra.sweep.dir)):
            note.unlink()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before every job."""
        hydra = HydraConfig.get()
        if hydra.mode == RunMode.MULTIRUN and rank() == 0:
            count = f" of {self.jobs}" if self.jobs else ""
            print(f"job {hydra.job.num + 1}{count}: {hydra.job.override_dirname}", file=sys.stderr, flush=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """After the last job.

        Raises:
            SystemExit: 2 where all jobs that failed did so by user errors, 1 where a job failed otherwise; where none
                failed and the table or the figures could not be written, what any app ends with then. 130 after
                Ctrl-C.
        """
        folder = Path(config.hydra.sweep.dir)
        code = _show(Path(config.out or folder)) if self.report and rank() == 0 else 0
        failed = sorted(_notes(folder), key=lambda note: int(note.stem.split("-")[0]))
        if not failed:
            if code:
                raise SystemExit(code)
            return
        ends = [(*note.stem.split("-"), note.read_text()) for note in failed]
        lines = [f"job {int(number) + 1} failed with exit code {code}: {overrides}" for number, code, overrides in ends]
        lines.append(f"{len(failed)} failed; their reasons are above, the other jobs are not affected")
        print_once("\n".join(lines))
        if code == INTERRUPTED:
            raise SystemExit(code)
        raise SystemExit(USER_ERROR if {code for _, code, _ in ends} == {str(USER_ERROR)} else 1)


def _notes(folder: Path) -> list[Path]:
    """Notes of failed jobs in a sweep's folder, where others may have files too."""
    return [note for note in (folder / FAILED).glob("*.txt") if re.fullmatch(r"[0-9]+-[0-9]+", note.stem)]


def _show(folder: Path) -> int:
    """The table and the figures of a sweep; an exit code, as Hydra would make a warning of an error."""
    from .bench.table import show_sweep  # an app without records needs none of it

    try:
        with reported():
            show_sweep(folder)
            sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except OSError as error:
        place = error.filename or folder
        reason = error.strerror or error
        print(f"error: cannot read or write {place} ({reason}); give another folder as out=", file=sys.stderr)
        return USER_ERROR
    except Exception:
        traceback.print_exc()
        return 1
    return 0
