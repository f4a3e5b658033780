"""Keeps learned step times between processes: one JSON file in the user's cache folder for each model and machine."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from lp.budget.observed_times import Estimate
from lp.compiled import COMPILED

FORMAT = 5  # version of the files, which is part of their names: other versions are not read


class StepTimesFile:
    """The file with the step times of one model on one machine; people may read, edit and remove it.

    It holds a JSON object with the entries of `about`, the time of writing, and the entries of `Estimate.as_json`.

    Args:
        about: description of what is timed, by name; the file's name begins with the first value, the model's name.
        key_parts: everything on which step times depend, such as model, device and versions; the file's name contains a
            hash of it.
        kept: contents of files by file name, used in this process instead of the cache folder if the folder can't be
            written to.
    """

    def __init__(self, about: Mapping[str, Any], key_parts: Sequence[Any], kept: dict[str, str]) -> None:
        self._about = about
        self._kept = kept
        digest = hashlib.blake2b(repr((FORMAT, *key_parts)).encode(), digest_size=6).hexdigest()
        name = re.sub(r"[^\w.-]+", "-", f"{next(iter(about.values()))}")[-80:].strip("-.")
        self.path = cache_folder() / f"{name}-{digest}.json"

    def text(self) -> str | None:
        """Contents of the file; None if there is no such file, or if it can't be read as text."""
        with contextlib.suppress(OSError, ValueError):  # no file, or not text
            return self._kept.get(self.path.name) or self.path.read_text(encoding="utf-8")
        return None

    def write(self, estimate: Estimate) -> None:
        """Write an estimate to the file, completely or not at all; if this fails, warn and keep the estimate in memory.

        Args:
            estimate: estimate of the step times.
        """
        day = datetime.now().astimezone().isoformat(" ", "minutes")
        text = json.dumps({**self._about, "written": day, **estimate.as_json()}, indent=1)
        try:
            _write(self.path, text)
        except OSError as error:
            if self.path.name not in self._kept:
                warnings.warn(
                    f"what is learned of step times is lost with this process, because {self.path.parent} "
                    f"cannot be written to ({error.strerror}): set XDG_CACHE_HOME to a folder of your own",
                    stacklevel=2,
                )
            self._kept[self.path.name] = text


def read_estimate(text: str) -> Estimate | None:
    """Read an estimate of step times from the contents of a file.

    Args:
        text: contents of the file.

    Returns:
        The estimate; None if the contents were cut off or edited into something invalid.
    """
    try:
        return Estimate.from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, AttributeError):
        return None


def machine_key(device: torch.device) -> tuple[Any, ...]:
    """The parts of a `StepTimesFile` key that describe this machine: processor or GPU, threads, library versions.

    Args:
        device: device that computes decode steps.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    versions = (torch.__version__, transformers.__version__, platform.python_version())
    return name, torch.get_num_threads(), COMPILED, *versions


def cache_folder() -> Path:
    """The folder for files of step times: lp/step_times in XDG_CACHE_HOME, or in ~/.cache if that is not absolute."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path(os.path.expanduser("~/.cache"))
    return cache / "lp" / "step_times"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {name or platform.processor()} {os.cpu_count()} {capability}"


def _write(path: Path, text: str) -> None:
    """Write the text to a file, whole or not at all."""
    if not path.is_absolute():  # without a home folder, "~" would be a folder right here
        raise FileNotFoundError(errno.ENOENT, "there is no home folder")
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
