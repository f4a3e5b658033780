"""A sweep as a whole: its jobs are announced, and at its end those that failed are listed and the others shown."""

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
        for note in failed_jobs(Path(config.hydra.sweep.dir)):
            note.unlink()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before every job of a sweep: say its number and what is its own."""
        hydra = HydraConfig.get()
        if hydra.mode == RunMode.MULTIRUN and rank() == 0:
            count = f" of {self.jobs}" if self.jobs else ""
            print(f"job {hydra.job.num + 1}{count}: {hydra.job.override_dirname}", file=sys.stderr, flush=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """After the last job: show the table, list the jobs that failed, and end with their exit code.

        Raises:
            SystemExit: 2 where all jobs that failed did so by user errors, 1 where a job failed otherwise; where none
                failed and the table or the figures could not be written, what any app ends with then. 130 after
                Ctrl-C.
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
