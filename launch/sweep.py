"""Jobs of a sweep: each may launch ranks of its own, one that fails leaves the others running, and the end says so."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from lp.checks import check_int

from .once import print_once

ROOT = Path(__file__).resolve().parent.parent
USER_ERROR, INTERRUPTED, READER_LEFT = 2, 130, 141
OBJECTIVE = "LP_OBJECTIVE"  # names the file in which a launch leaves what its task returned
OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FAILED = "failed"  # the folder of a sweep with a file for every failed job
NOTHING = 0.0  # what a sweeper is told of a failed job


def tell(value: float | None) -> float | None:
    """Leave what a task returned to the process that launched this one, if there is one."""
    if value is not None and (path := os.environ.get(OBJECTIVE)) and os.environ.get("RANK", "0") == "0":
        Path(path).write_text(repr(value))
    return value


def relaunch(nproc: int, app: str | None = None, instead: Sequence[str] | None = None) -> float | None:
    """Run this job once more, on so many ranks of this machine, and return what rank 0 returned.

    Args:
        nproc: ranks.
        app: another app of launch/; None is this one.
        instead: its overrides; None takes this job's.

    Raises:
        SystemExit: the exit code of the ranks, if it is not 0.
        ValueError: `parallel.nproc` is out of range, or ranks would launch ranks.
    """
    check_int("parallel.nproc", nproc, 1, float("inf"), "or null, to run in this process")
    if "WORLD_SIZE" in os.environ:
        raise ValueError(f"parallel.nproc is {nproc} in a launch of {os.environ['WORLD_SIZE']} ranks; leave one out")
    hydra = HydraConfig.get()
    app = app or {"config": "generate"}.get(str(hydra.job.config_name), hydra.job.config_name)
    asked = hydra.overrides.task if instead is None else instead
    overrides = [*asked, "parallel.nproc=null", "hydra.mode=RUN"]
    ranks = [sys.executable, str(ROOT / "scripts" / "torchrun.py"), "--standalone", "--nproc-per-node", str(nproc)]
    with tempfile.TemporaryDirectory(prefix="lp-") as folder:
        objective = Path(folder) / "objective"
        env = {key: value for key, value in os.environ.items() if key not in (*OF_A_LAUNCH, "HYDRA_FULL_ERROR")}
        env |= {OBJECTIVE: str(objective), "LP_RUN_DIR": str(folder_of_run())}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        code = subprocess.run([*ranks, "-m", f"launch.{app}", *overrides], env=env, check=False).returncode
        if code:
            raise SystemExit(code if code > 0 else 128 - code)
        return float(objective.read_text()) if objective.exists() else None


def folder_of_run() -> Path:
    """Where this run writes: the folder that Hydra made, or of a sweep the one that its jobs share."""
    hydra = HydraConfig.get()
    return Path(hydra.sweep.dir if hydra.mode == RunMode.MULTIRUN else hydra.runtime.output_dir).absolute()


def surviving(job: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """The job; in a sweep, its failure is noted and the next one runs. Ctrl-C ends the sweep."""

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
        note.parent.mkdir(exist_ok=True)
        note.write_text(hydra.job.override_dirname)
        return NOTHING

    return survived


class SweepEnd(Callback):
    """Says at the end of a sweep which jobs failed, and ends the process with their exit code.

    Args:
        report: whether the jobs wrote rows of a benchmark, to be shown together.
    """

    def __init__(self, report: bool = False) -> None:
        self.report = report

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the first job: what failed when the same folder was swept before is being done again."""
        for note in (Path(config.hydra.sweep.dir) / FAILED).glob("*.txt"):
            note.unlink()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """After the last job.

        Raises:
            SystemExit: jobs failed; 2 if all of them by user errors, else 1.
        """
        folder = Path(config.hydra.sweep.dir)
        if self.report and os.environ.get("RANK", "0") == "0":
            from .bench.table import show_sweep  # an app without rows needs none of it

            show_sweep(Path(config.out or folder))
        failed = sorted((folder / FAILED).glob("*.txt"), key=lambda note: int(note.stem.split("-")[0]))
        lines = []
        for note in failed:
            number, code = note.stem.split("-")
            lines.append(f"job {number} failed with exit code {code}: {note.read_text()}")
        if failed:
            lines.append(f"{len(failed)} failed; their reasons are above, the other jobs are not affected")
            print_once("\n".join(lines))
            raise SystemExit(USER_ERROR if {note.stem.split("-")[1] for note in failed} == {"2"} else 1)
