"""What every app starts with: Hydra around a task. HYDRA_FULL_ERROR=1 shows every traceback."""

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
    """Compose the config from sys.argv and run the task, once or for every job of a sweep.

    Args:
        task: what the app does with its config.
        config_name: name of the YAML file in conf/ that has the app's keys.

    Raises:
        SystemExit: 2 after a user error, or where a device is full, 130 after Ctrl-C.
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
        with reported():
            app(_sent(task))()
            _leave()  # not after a job: the next one of a sweep shares the group
    finally:
        del os.environ[FULL_ERROR]


def import_plugins() -> None:
    """Import the modules that the user names, so that the draft sources which they register can be chosen.

    Raises:
        ValueError: one cannot be imported.
    """
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"{PLUGINS} names {name!r}, which cannot be imported ({error}); mend it") from None


def register_resolvers() -> None:
    """What conf/ asks for: the folders of a run, and the package of the apps, lp.launch where installed."""
    OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
    OmegaConf.register_new_resolver("sweep_dir", _sweep_dir, replace=True)
    OmegaConf.register_new_resolver("app_package", lambda: PACKAGE, replace=True)


def _sent(task: Callable[[Any], float | None]) -> Callable[[DictConfig], float | None]:
    """The job of an app as Hydra gets it, whose launchers pickle it for other processes, on other machines.

    It says what went wrong itself: what leaves a job makes Hydra print a line of its own.
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
    """Leave the process group, which only a process that has imported torch can have joined."""
    if "torch" in sys.modules:
        from lp.parallel.rendezvous import leave

        leave()


def _run_dir(default: str) -> str:
    """Where rank 0 writes, by default with its process's number: others may begin in the same second.

    Hydra makes this folder on every rank: those that write nothing name one that is there.
    """
    return "." if rank() > 0 else os.environ.get("LP_RUN_DIR", f"{default}-{os.getpid()}")


def _sweep_dir(default: str) -> str:
    """The folder that a sweep writes to. Hydra puts a file there on every rank: those but 0 get one that is removed."""
    return _scratch().name if rank() > 0 else _run_dir(default)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="lp-")


def _remove_if_empty(run_dir: Path) -> None:
    """Hydra makes a run folder; in outputs/, a run that wrote nothing leaves none.

    outputs/ itself stays, as another run may be making its folder there.
    """
    outputs = Path("outputs").resolve()
    if not run_dir.is_relative_to(outputs):
        return
    with contextlib.suppress(OSError):  # not empty, or gone
        for folder in itertools.takewhile(lambda each: each != outputs, (run_dir, *run_dir.parents)):
            folder.rmdir()
