"""Hydra callbacks of a sweep: they announce its jobs, and at its end show the results and list the failed jobs."""

from __future__ import annotations

import math
import sys
import traceback
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from .running.errors import INTERRUPTED, USER_ERROR, reported
from .running.jobs import failed_jobs, goes_on
from .running.once import print_once, rank


def count_jobs(config: DictConfig) -> int | None:
    """How many jobs a sweep has, with Hydra's own sweeper or Optuna's; None where only the sweeper can know.

    Args:
        config: the job's whole config, with the node `hydra`.
    """
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
    """Hydra callback that announces each job of a sweep, lists failed jobs at the end, and sets the process' exit code.

    Args:
        report: whether the jobs write benchmark records, which are then shown in one table after the last job.
    """

    def __init__(self, report: bool = False) -> None:
        self.report = report
        self.jobs: int | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the first job: delete an earlier sweep's notes of failed jobs in the same folder, and count the jobs.

        The notes would otherwise be listed as failures of this sweep. If the jobs write benchmark records, a line on
        stderr says how to continue the sweep after an interruption.
        """
        self.jobs = count_jobs(config)
        if self.report and config.get("out") is None and rank() == 0:
            print(goes_on(Path(config.hydra.sweep.dir).absolute()), file=sys.stderr, flush=True)
        for note in failed_jobs(Path(config.hydra.sweep.dir)):
            note.unlink()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before every job of a sweep: print its number and the overrides that distinguish it from the other jobs."""
        hydra = HydraConfig.get()
        if hydra.mode == RunMode.MULTIRUN and rank() == 0:
            count = f" of {self.jobs}" if self.jobs else ""
            print(f"job {hydra.job.num + 1}{count}: {hydra.job.override_dirname}", file=sys.stderr, flush=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """After the last job: show the table, list the jobs that failed, and end the process with an exit code.

        Raises:
            SystemExit: 2 where every failed job failed by a user error, 130 after Ctrl-C, 1 where a job failed
                otherwise. Where no job failed but the table or the plots could not be written, the code of that error.
        """
        folder = Path(config.hydra.sweep.dir)
        code = _show(Path(config.out or folder)) if self.report and rank() == 0 else 0
        failed = sorted(failed_jobs(folder), key=lambda note: int(note.stem.split("-")[0]))
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


def _show(folder: Path) -> int:
    """Print the table and draw the plots of a sweep; return an exit code, as Hydra turns exceptions into warnings."""
    from .bench.terminal import show_sweep  # an app without records needs none of it

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
