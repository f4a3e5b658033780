"""The start of every app: Hydra composes the config and runs the task. HYDRA_FULL_ERROR=1 shows tracebacks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lp.errors import UserError

from .. import PACKAGE
from ..config.schema import register, settings
from .errors import reported
from .jobs import leave_objective, relaunch, surviving
from .once import rank

CONF = Path(__file__).resolve().parents[2] / "conf"  # beside launch/, in a clone as in site-packages/lp
PLUGINS = "LP_PLUGINS"  # an environment variable: modules of the user's, separated by commas
FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own switch: raise, instead of printing and exiting with 1


def run(task: Callable[[Any], float | None], config_name: str = "generate") -> None:
    """Compose an app's config from sys.argv and run its task, once or for every job of a sweep.

    Args:
        task: runs the app with its config; its return value is the objective that a sweep optimises.
        config_name: name of the YAML file in conf/ with the app's keys.

    Raises:
        SystemExit: 2 after a user error, or where a disk is full, 130 after Ctrl-C.
    """
    with reported():
        import_plugins()
    register()
    register_resolvers()
    app = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)
    if os.environ.get(FULL_ERROR) == "1":
        app(_job(task))()
        _leave()
        return
    os.environ[FULL_ERROR] = "1"
    try:
        with reported(config_name):
            app(_sent(task))()
            _leave()  # not after a job: the next one of a sweep shares the group
    finally:
        del os.environ[FULL_ERROR]


def import_plugins() -> None:
    """Import the user's modules that LP_PLUGINS names, so that their draft sources are registered and can be chosen.

    Raises:
        ValueError: a module cannot be imported.
    """
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"{PLUGINS} names {name!r}, which cannot be imported ({error}); mend it") from None


def register_resolvers() -> None:
    """Register the resolvers that YAML files in conf/ call: the folders of runs and sweeps, and the apps' package."""
    OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
    OmegaConf.register_new_resolver("sweep_dir", _sweep_dir, replace=True)
    OmegaConf.register_new_resolver("app_package", lambda: PACKAGE, replace=True)


def _sent(task: Callable[[Any], float | None]) -> Callable[[DictConfig], float | None]:
    """The job of an app for Hydra, whose launchers may pickle it and send it to other machines.

    It reports its errors itself, as Hydra prints a line of its own about each that leaves a job.
    """
    job = _job(task)

    def reporting(cfg: DictConfig) -> float | None:
        with reported():  # as a decorator, it would be in the pickle
            return job(cfg)

    return surviving(reporting)


def _job(task: Callable[[Any], float | None]) -> Callable[[DictConfig], float | None]:
    def job(cfg: DictConfig) -> float | None:
        try:
            config = settings(cfg)
            nproc = config.parallel.nproc
            value = leave_objective(task(config)) if nproc is None else relaunch(nproc)
            sys.stdout.flush()  # here, where a disk that is full can still be reported
            return value
        finally:
            _remove_if_empty(Path(HydraConfig.get().runtime.output_dir))

    return job


def _leave() -> None:
    """Leave the process group, if this process can have joined one: only if it has imported torch."""
    if "torch" in sys.modules:
        from lp.parallel.rendezvous import leave

        leave()


def _run_dir(default: str) -> str:
    """Where rank 0 writes, by default with its process's number: others may begin in the same second.

    Hydra makes this folder on every rank: those that write nothing name one that is there.
    """
    return "." if rank() > 0 else os.environ.get("LP_RUN_DIR", f"{default}-{os.getpid()}")


def _sweep_dir(default: str) -> str:
    """The folder that a sweep writes to; on ranks other than 0, where Hydra writes a file, too, one that is removed."""
    return _scratch().name if rank() > 0 else _run_dir(default)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="lp-")


def _remove_if_empty(run_dir: Path) -> None:
    """Remove the folder that Hydra made below outputs/ for a run, if the run wrote nothing.

    outputs/ itself stays, as another run may be making its folder there.
    """
    outputs = Path("outputs").resolve()
    if not run_dir.is_relative_to(outputs):
        return
    with contextlib.suppress(OSError):  # not empty, or gone
        for folder in itertools.takewhile(lambda each: each != outputs, (run_dir, *run_dir.parents)):
            folder.rmdir()
