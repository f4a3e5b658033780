"""Step times on disk: measured once for a model and a machine, and read from the user's cache folder afterwards."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from lp.budget.step_times import StepTimes
from lp.compiled import COMPILED
from lp.parallel.context import ParallelContext

FORMAT = 3  # of the files, and part of their names: other formats are not read


def load_or_measure(
    key_parts: Sequence[Any], measure: Callable[[], StepTimes], context: ParallelContext, fallback: dict[str, str]
) -> StepTimes:
    """The step times of this model and machine: from the cache folder, or measured and written there.

    Args:
        key_parts: all that they depend on.
        measure: measures them, on all ranks.
        context: the ranks; what rank 0 finds counts.
        fallback: where they are left if the folder cannot be written to.
    """
    key = hashlib.blake2b(repr((FORMAT, *key_parts)).encode(), digest_size=12).hexdigest()
    path = cache_folder() / f"{key}.json"
    text = fallback.get(key)
    if context.is_main and text is None:
        with contextlib.suppress(OSError, ValueError):  # no file, or not text: the other ranks wait for an answer
            text = path.read_text(encoding="utf-8")
    text = context.share_text(text, "looking for step times")
    if text:
        try:
            return StepTimes(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            pass  # a file that was cut or edited: measured again
    step_times = measure()
    if context.is_main:
        text = json.dumps(asdict(step_times))
        try:
            _write(path, text)
        except OSError as error:
            fallback[key] = text
            warnings.warn(
                f"the step times are measured again for every model that is loaded, because {path.parent} cannot be "
                f"written to ({error.strerror}): set XDG_CACHE_HOME to a folder of your own",
                stacklevel=2,
            )
    return step_times


def machine_key(device: torch.device) -> tuple[Any, ...]:
    """What a step's time depends on of this machine and its libraries."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    versions = (torch.__version__, transformers.__version__, platform.python_version())
    return name, torch.get_num_threads(), COMPILED, *versions


def cache_folder() -> Path:
    """Where the files lie. As the XDG base directory specification has it, a relative path is ignored."""
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
    """Write the whole file or nothing."""
    if not path.is_absolute():  # without a home folder, "~" would be a folder right here
        raise FileNotFoundError(errno.ENOENT, "there is no home folder")
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
