"""Step times on disk: measured once for a model and a machine, and read from the user's cache folder afterwards."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from lp.budget.measure import Measurement
from lp.budget.step_times import StepTimes
from lp.compiled import COMPILED
from lp.parallel.context import ParallelContext

FORMAT = 4  # of the files, and part of their names: other formats are not read
PLAIN = "plain"  # the plain step's name in a file


class StepTimesFile:
    """Where the step times of a model and a machine are stored, for a person to read, to change and to remove.

    A JSON object: what is timed, and `seconds` of a step by its tokens, and of a plain step. The file's name begins
    with the model's.

    Args:
        about: what is timed, in words.
        key_parts: all that the step times depend on.
        kept: where the text is left if the folder cannot be written to.
    """

    def __init__(self, about: Mapping[str, Any], key_parts: Sequence[Any], kept: dict[str, str]) -> None:
        self._about = about
        self._kept = kept
        digest = hashlib.blake2b(repr((FORMAT, *key_parts)).encode(), digest_size=6).hexdigest()
        name = re.sub(r"[^\w.-]+", "-", f"{next(iter(about.values()))}")[-80:].strip("-.")
        self.path = cache_folder() / f"{name}-{digest}.json"

    def text(self) -> str | None:
        """What is in it; None if it is not there."""
        with contextlib.suppress(OSError, ValueError):  # no file, or not text
            return self._kept.get(self.path.name) or self.path.read_text(encoding="utf-8")
        return None

    def write(self, times: StepTimes) -> None:
        """Write the whole file or nothing; warns where the folder cannot be written to."""
        seconds = {PLAIN: times.plain_s, **dict(zip(map(str, times.num_tokens), times.seconds, strict=True))}
        day = datetime.now().astimezone().isoformat(" ", "minutes")
        text = json.dumps({**self._about, "written": day, "seconds": seconds}, indent=1)
        try:
            _write(self.path, text)
        except OSError as error:
            if self.path.name not in self._kept:
                warnings.warn(
                    f"the step times are measured again for every model that is loaded, because {self.path.parent} "
                    f"cannot be written to ({error.strerror}): set XDG_CACHE_HOME to a folder of your own",
                    stacklevel=2,
                )
            self._kept[self.path.name] = text


def read_step_times(text: str) -> StepTimes | None:
    """Those of a file's text; None if it was cut, or edited into something else."""
    try:
        seconds = dict(json.loads(text)["seconds"])
        plain_s = seconds.pop(PLAIN)
        return StepTimes(tuple(map(int, seconds)), tuple(seconds.values()), plain_s)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None


def load_or_measure(
    file: StepTimesFile, measure: Callable[[], Measurement], context: ParallelContext, again: bool = False
) -> Measurement:
    """The step times of this model and machine: from the file, or measured, and stored if they can be trusted.

    Args:
        file: of rank 0; the others' is not looked at.
        measure: measures them, on all ranks.
        context: the ranks; what rank 0 finds counts.
        again: measure them, whatever is stored.
    """
    text = file.text() if context.is_main and not again else None
    text = context.share_text(text, "looking for step times")
    if text and (times := read_step_times(text)):
        return Measurement(times, ())
    measured = measure()
    if context.is_main and not measured.doubtful:
        file.write(measured.times)
    return measured


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
