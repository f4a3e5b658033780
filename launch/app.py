"""What every app starts with: Hydra around a task, and errors as a user wants to read them.

A user error is one line on stderr and exit code 2, as is a disk that is full or a run folder that cannot be made; a
rank that was lost is one line and exit code 1, Ctrl-C is exit code 130, SIGTERM 0 where the app ends as asked; anything
else is a bug and keeps its traceback.
HYDRA_FULL_ERROR=1 keeps every traceback.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import linecache
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, MissingMandatoryValue, OmegaConfBaseException

from lp.engine.signals import asked_to_end
from lp.parallel.rendezvous import RankLost, leave

from .once import print_once, rank
from .schema import register, settings, unknown_key
from .sweep import INTERRUPTED, READER_LEFT, USER_ERROR, relaunch, surviving, tell

CONF = Path(__file__).resolve().parent.parent / "conf"
LOST = 1
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
PLUGINS = "LP_PLUGINS"  # an environment variable: modules of the user's, separated by commas
OURS = ("lp", "launch", "__main__")
FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own switch: raise, instead of printing and exiting with 1


def run(task: Callable[[Any], float | None], config_name: str = "config") -> None:
    """Compose the config from sys.argv and run the task, once or for every job of a sweep.

    Args:
        task: what the app does with its config.
        config_name: of the YAML file in conf/ that the app's keys are in.

    Raises:
        SystemExit: 2 after a user error, 130 after Ctrl-C.
    """
    with reported():
        import_plugins()
    register()
    OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
    OmegaConf.register_new_resolver("sweep_dir", _sweep_dir, replace=True)
    app = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)
    if os.environ.get(FULL_ERROR) == "1":
        app(_job(task))()
        leave()
        return
    os.environ[FULL_ERROR] = "1"
    try:
        with reported():
            # Around the job too: what leaves a job makes Hydra print a line of its own.
            app(surviving(reported()(_job(task))))()
            leave()  # not after a job: the next one of a sweep shares the group
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
            raise ValueError(f"{PLUGINS} names {name!r}, which cannot be imported ({error}); mend it") from None


def _job(task: Callable[[Any], float | None]) -> Callable[[DictConfig], float | None]:
    def job(cfg: DictConfig) -> float | None:
        try:
            config = settings(cfg)
            nproc = config.parallel.nproc
            value = tell(task(config)) if nproc is None else relaunch(nproc)
            sys.stdout.flush()  # here, where a disk that is full can still be reported
            return value
        finally:
            _tidy(Path(HydraConfig.get().runtime.output_dir))

    return job


def _run_dir(default: str) -> str:
    """Where rank 0 writes. Hydra makes the folder it is told: the other ranks, which write nothing, name this one."""
    return "." if rank() > 0 else os.environ.get("LP_RUN_DIR", default)


def _sweep_dir(default: str) -> str:
    """The same of a sweep, in which Hydra also writes a file: the other ranks' is gone when they end."""
    return _nowhere().name if rank() > 0 else _run_dir(default)


@functools.cache
def _nowhere() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="lp-")


def _tidy(run_dir: Path) -> None:
    """Hydra makes a run folder; under outputs/, a run that wrote nothing leaves none."""
    outputs = Path("outputs").resolve()
    if not run_dir.is_relative_to(outputs):
        return
    with contextlib.suppress(OSError):  # not empty, or gone
        for folder in (run_dir, *run_dir.parents):
            folder.rmdir()
            if folder == outputs:
                break


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn a user error into one line and an exit code.

    Raises:
        SystemExit: 2 after a user error, 1 after the loss of a rank, 130 after Ctrl-C, 0 after SIGTERM.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise SystemExit(0 if asked_to_end(error) else INTERRUPTED) from None
    except BrokenPipeError:  # the reader left, as in `| head`
        _drop_stdout()
        raise SystemExit(READER_LEFT) from None
    except RankLost as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(LOST) from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if not is_users(error):
            raise
        print_once(f"error: {explain(error)}")
        raise SystemExit(USER_ERROR) from None
    except OSError as error:
        what = f"{error.filename} " * bool(error.filename)
        if error.errno in DISK_FULL:
            _drop_stdout()
            remedy = "make room, or write elsewhere"
        elif _hydras(error):
            remedy = "give a folder that can be made, as in hydra.run.dir=runs/1"
        else:
            raise
        print_once(f"error: cannot write {what}({error.strerror}); {remedy}")
        raise SystemExit(USER_ERROR) from None


def _hydras(error: Exception) -> bool:
    """Whether Hydra met it, which makes the run's folder, and not what it runs."""
    names = [str(frame.f_globals["__name__"]).split(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [name for name in names if name in ("hydra", *OURS)][-1:] == ["hydra"]


def _drop_stdout() -> None:
    """Python's own flush at exit must not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def explain(error: Exception) -> str:
    """One line that names the key and the remedy."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, OverrideParseException):
        key = str(error.override).partition("=")[0]
        file = ", or put the prompt into a file: prompt_file=..." * (key == "prompt")
        return (
            f"cannot read the override {error.override!r}; quote a value that has special characters twice, "
            f"as in {key}='\"def f(x):\"'{file}"
        )
    if isinstance(cause, ConfigAttributeError) and cause.full_key and cause.object_type:
        return unknown_key(str(cause.full_key), cause.object_type)
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key} is missing; give {cause.full_key}=..."
    if isinstance(cause, OmegaConfBaseException) and cause.full_key and "not a ListConfig" in str(cause):
        return f'{cause.full_key} takes a list, as in {cause.full_key}=\'["a","b"]\''
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"{cause.full_key}: {_first_line(cause)}; --cfg job shows every key with its value"
    return " ".join(str(error).split("Config search path")[0].split())


def is_users(error: Exception) -> bool:
    """Whether the user can mend it: a ValueError that a `raise` of ours made; from elsewhere it is a bug of ours."""
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return True
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    ours = str(frame.f_globals["__name__"]).split(".")[0] in OURS
    return ours and linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]
