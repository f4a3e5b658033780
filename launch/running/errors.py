"""What a user sees of an app's errors: one line, and an exit code.

The code is 2 after a user error, on a disk that is full or read-only, and where a run folder cannot be made; 1 after a
lost rank; 130 after Ctrl-C; 0 after SIGTERM. Anything else is a bug and has its traceback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from lp.commands import install_command
from lp.engine.interrupts import asked_to_end
from lp.errors import RankFailed, RankLost, UserError
from lp.removed_keys import removal

from ..apps import APPS
from ..config.arguments import as_prompt, closest
from .once import print_once

LOST = 1
USER_ERROR = 2
INTERRUPTED = 130
READER_LEFT = 141
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
EXTRAS = {  # with Hydra's plug-ins, by the config that a plug-in brings
    "hydra/launcher/joblib": "sweeps",
    "hydra/launcher/submitit_local": "sweeps",
    "hydra/launcher/submitit_slurm": "sweeps",
    "hydra/sweeper/optuna": "sweeps",
    "hydra/launcher/ray": "sweeps-ray",
}
OURS = ("lp", "launch", "__main__")


@contextlib.contextmanager
def reported(app: str = "") -> Iterator[None]:
    """Within the block, an error that a user can fix becomes one line on stderr and an exit code.

    An error that is a bug is raised as usual, with its traceback.

    Args:
        app: name of the app whose config is composed within the block, for remedies that are the app's own.

    Raises:
        SystemExit: 2 after a user error, or where a disk or memory is full, 1 after the loss or failure of a rank, 130
            after Ctrl-C, 0 after SIGTERM, 141 where the reader of stdout has gone.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise SystemExit(0 if asked_to_end(error) else INTERRUPTED) from None
    except BrokenPipeError:  # the reader left, as in `| head`
        _drop_stdout()
        raise SystemExit(READER_LEFT) from None
    except (RankFailed, RankLost) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(LOST) from None
    except (HydraException, OmegaConfBaseException, UserError) as error:
        print_once(f"error: {explain(error, app)}")
        raise SystemExit(USER_ERROR) from None
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which need not have been imported
            raise
        print(f"error: {error}", file=sys.stderr)  # whichever rank has no room
        raise SystemExit(USER_ERROR) from None
    except OSError as error:
        if error.errno in DISK_FULL:
            _drop_stdout()
            remedy = "make room, or write elsewhere"
        elif _raised_by_hydra(error):
            remedy = "give a folder that can be made, as in hydra.run.dir=/tmp/run, or for a sweep hydra.sweep.dir="
        elif error.errno == errno.EROFS:
            remedy = "write elsewhere"
        else:
            raise
        file = f"{error.filename} " if error.filename else ""
        print_once(f"error: cannot write {file}({error.strerror}); {remedy}")
        raise SystemExit(USER_ERROR) from None


def _raised_by_hydra(error: Exception) -> bool:
    """Whether an error comes from Hydra's own code, which makes the run's folder, and not from the app in it."""
    names = [str(frame.f_globals["__name__"]).split(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [name for name in names if name in ("hydra", *OURS)][-1:] == ["hydra"]


def _drop_stdout() -> None:
    """Send the rest of stdout nowhere, so that Python's own flush at exit does not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def explain(error: Exception, app: str = "") -> str:
    """One line for the user about an error in the config or its overrides: the key, and what to write instead.

    Args:
        error: an error from Hydra or OmegaConf, or a UserError.
        app: name of the app, where its config was being composed.
    """
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if told := _removed(error, cause):
        return told
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key and is_dataclass(cause.object_type):
        from ..config.schema import unknown_key  # imports lp's functions, which launch/cli.py may have to compile first

        key = str(cause.full_key)
        override = str(error).partition("To append to your config use +")[2]  # as it was typed
        return unknown_key(key, cause.object_type, cause.parent_node) + _if_meant_otherwise(override, key, app)
    if _is_of_key(error, cause):
        return "api_key= cannot be read, and is not shown here; give the key in the environment, as LP_API_KEY"
    if isinstance(error, OverrideParseException):
        override = str(error.override)
        return _unreadable(override) + _if_meant_otherwise(override, override.partition("=")[0], app)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file in EXTRAS:
        command = install_command(EXTRAS[error.missing_cfg_file])
        return f"{error.missing_cfg_file} is a plug-in of Hydra that is not installed; install the extra: {command}"
    if isinstance(error, ConfigCompositionException) and (told := _of_another_app(error)):
        return told
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"{_one_line(error)}{closest(option, error.options, f'{group}=')}"
    if isinstance(cause, MissingMandatoryValue) and cause.full_key:  # None within a debugger
        return f"{cause.full_key} is missing; give {cause.full_key}=..."
    if isinstance(cause, OmegaConfBaseException) and cause.full_key and "not a ListConfig" in str(cause):
        return f'{cause.full_key} takes a list, as in {cause.full_key}=\'["a","b"]\''
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"{cause.full_key}: {str(cause).splitlines()[0]}; --cfg job shows every key with its value"
    if "value for argument 'prompt=" in str(error):  # Hydra takes a comma for the values of a sweep
        return f"{_one_line(error)}; or give the text as it is: --prompt TEXT"
    return _one_line(error)


def _removed(error: Exception, cause: BaseException) -> str | None:
    """The line about a key of an earlier version: what to write instead; None for any other error."""
    override = re.search(r"Could not (?:override|delete from config\.) '([^']*)'", str(error))
    inner = error.__context__ if cause is error else cause
    place = getattr(inner, "full_key", None)
    is_unknown = isinstance(inner, ConfigAttributeError | ConfigKeyError)  # else its value is at fault
    keys = [override[1] if override else "", f"{place}" if is_unknown else "", f"{place}="]
    return next(filter(None, map(removal, keys)), None)


def _of_another_app(error: ConfigCompositionException) -> str | None:
    """The line about an experiment that sets a key which only other apps have; None for any other error."""
    file, inner = re.match(r"In 'experiment/([^']*)'", str(error)), error.__context__
    if not file or not isinstance(inner, ConfigAttributeError | ConfigKeyError):
        return None
    key, schemas = str(inner.full_key), ConfigStore.instance().repo["schema"]
    apps = [app for app in APPS if key in _keys(OmegaConf.get_type(schemas[f"{app}.yaml"].node))]
    if not apps:
        return None
    others = " or ".join(f"lp {app}" for app in apps)
    return f"experiment={file[1]} is of another app: it sets {key}, which this one does not have; start {others}"


def _keys(schema: Any) -> list[str]:
    return [item.name for item in dataclasses.fields(schema)]


def _is_of_key(error: Exception, cause: BaseException) -> bool:
    """Whether an error's message would show the value of the server's API key, however that was written."""
    override = str(getattr(error, "override", None) or "")  # as it was typed
    of_prompt = override.startswith("prompt=") or "argument 'prompt=" in str(error)
    if isinstance(error, HydraException) and not of_prompt and names_key(f"{override} {error}"):
        return True
    return getattr(cause, "full_key", None) == "api_key"


def names_key(text: str) -> bool:
    """Whether a text names the server's API key, in any spelling: `api_key`, `--api-key`, `LP_API_KEY`."""
    return "apikey" in text.lower().replace("_", "").replace("-", "")


def _if_meant_otherwise(override: str, key: str, app: str) -> str:
    """The end of a message about an override that may have been meant as a text or a file; "" where that cannot be.

    Args:
        override: the override as it was typed.
        key: its key.
        app: name of the app.
    """
    if not override or key in ("prompt", "prompt_file") or "." in key or names_key(override):
        return ""
    if app == "generate":
        return f"; {as_prompt(override)}"
    return "; a file with = in its name begins with ./" if app == "batch" else ""


def _unreadable(override: str) -> str:
    key = override.partition("=")[0]
    if key == "prompt":
        return f"cannot read the override {override!r}; give the text as it is: --prompt TEXT, or prompt_file=FILE"
    return (
        f"cannot read the override {override!r}; quote a value that has special characters twice, "
        f"as in {key}='\"def f(x):\"'"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split("Config search path")[0].split())
