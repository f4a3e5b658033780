"""t(T): what a step of T rows takes, measured once and kept on disk, and what it teaches about rows.

T: rows of a step, the last generated token's included. Bumps are used: where a larger step is cheaper, a step is
padded up to it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from lp.compiled import COMPILED
from lp.parallel.context import ParallelContext

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WORTH_PADDING = 0.9  # of a step's time: less than noise is no reason to run rows that say nothing
DEAREST = 16.0  # times the cheapest step: larger ones never pay
MAX_STEP_TOKENS = 1 << 14  # whose times fit a table
ROUNDS, PATIENT_S, LIMIT_S = 15, 2.5, 5.0
FORMAT = 1


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a whole step (model, exchange, host) by its rows.

    Args:
        rows: sizes measured, ascending, the first 1.
        seconds: of each.
        plain_s: of a step that guesses nothing and learns nothing.

    Raises:
        ValueError: no sizes, or seconds that are none.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    plain_s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows))
        object.__setattr__(self, "seconds", tuple(self.seconds))
        ascending = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        whole = {*map(type, self.rows)} == {int} and self.rows[0] == 1
        if not whole or not ascending or len(self.rows) != len(self.seconds) or self.most > MAX_STEP_TOKENS:
            limit = f"it needs 1 and up to {MAX_STEP_TOKENS} at most, one each"
            raise ValueError(f"a step curve has rows {self.rows}, seconds {self.seconds}; {limit}")
        if not all(0 < value < float("inf") for value in (*self.seconds, self.plain_s)):
            raise ValueError(f"a step curve has seconds {self.seconds}, {self.plain_s}; measure it again")

    @property
    def most(self) -> int:
        """The largest size measured."""
        return self.rows[-1]

    @cached_property
    def _padded(self) -> list[int]:
        """By rows, how many to run."""
        raw = np.interp(np.arange(self.most + 1), self.rows, self.seconds)
        sizes = list(range(self.most + 1))
        cheapest = self.most
        for rows in range(self.most, 0, -1):
            if raw[rows] < raw[cheapest]:
                cheapest = rows
            elif raw[cheapest] < WORTH_PADDING * raw[rows]:
                sizes[rows] = cheapest
        return sizes

    def padded(self, rows: int) -> int:
        """How many rows to run for so many: more where that is cheaper."""
        return self._padded[rows] if rows <= self.most else rows

    @cached_property
    def bearable(self) -> int:
        """Rows of the largest step that takes no longer than two of plain decoding."""
        return max(int(np.searchsorted(self.table, 2 * self.plain_s, "right")) - 1, 1)

    @cached_property
    def table(self) -> np.ndarray:
        """Seconds by rows, 0 to `most`, padding used; it never falls."""
        raw = np.interp(np.arange(self.most + 1), self.rows, self.seconds)[self._padded]
        return np.minimum.accumulate(raw[::-1])[::-1]

    def step_s(self, rows: int) -> float:
        """Seconds of a step; past the largest size measured, in proportion to its rows."""
        if rows <= self.most:
            return float(self.table[rows])
        return float(self.table[-1] * rows / self.most)

    @cached_property
    def slopes(self) -> np.ndarray:
        """By rows: the least that a further row costs, on average, in the best of all larger steps. (most + 1,)

        A row less likely than this price pays in no larger step, since later rows are less likely still.
        """
        table, slopes = self.table, np.full(self.most + 1, np.inf)
        for rows in range(self.most):
            more = np.arange(1, self.most - rows + 1)
            slopes[rows] = ((table[rows + 1 :] - table[rows]) / more).min()
        return slopes

    def __str__(self) -> str:
        shown = [size for size in self.rows if size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]
        times = " ".join(f"{size}:{1e3 * self.step_s(size):.2f}" for size in shown)
        pads = sorted({size for rows, size in enumerate(self._padded) if size > rows})
        return f"t(T) in ms {times}, plain {1e3 * self.plain_s:.2f}" + f"; padded up to {pads}" * bool(pads)


def flat(seconds: float, most: int) -> StepTimes:
    """Rows cost nothing."""
    return StepTimes((1, most), (seconds, seconds), seconds)


def measure(step: Callable[[int], float], most: int, context: ParallelContext) -> StepTimes:
    """Time steps of every size in alternation, for a few seconds at most; all ranks take rank 0's times.

    Args:
        step: takes a step of so many rows on all ranks and returns its seconds on this one; 0 is a plain step.
        most: rows.
        context: the ranks.
    """

    def told(size: int) -> float:
        return float(context.broadcast(torch.tensor([step(size)], dtype=torch.float64), 0))

    sizes = [0, *(size for size in SIZES if size < most), most]
    for size in sizes[:2]:
        told(size)  # compiles, allocates
    times: dict[int, list[float]] = {}
    for size in sizes:
        late = sum(map(sum, times.values())) > LIMIT_S  # a slow model: a few sizes tell how its curve runs
        if late and size not in (1, 8, 32, most):
            continue
        times[size] = [min(told(size) for _ in range(1 if late else 2))]
        dearest = DEAREST * times[0][0]
        if dearest < times[size][0] < LIMIT_S / 10:  # or was the machine busy?
            times[size] = [min(times[size][0], *(told(size) for _ in range(4)))]
        if times[size][0] > dearest:
            break  # known to be too dear, which is enough
    spent = 2 * sum(map(sum, times.values()))
    cheap = [size for size in times if times[size][0] <= DEAREST * times[0][0]]
    for turn in range(1, ROUNDS):
        if spent > (PATIENT_S if turn > 3 else LIMIT_S):
            break
        for size in cheap[:: 1 if turn % 2 else -1]:
            times[size].append(told(size))
            spent += times[size][-1]
    plain, *rest = (min(taken) for taken in times.values())  # what else the machine does only ever adds
    return StepTimes(tuple(times)[1:], tuple(rest), plain)


def remembered(
    parts: Sequence[Any], measured: Callable[[], StepTimes], context: ParallelContext, kept: dict[str, str]
) -> StepTimes:
    """The curve of this model and machine from the user's cache folder, else measured and written there.

    Args:
        parts: what the curve depends on.
        measured: makes it, on all ranks.
        context: the ranks; what rank 0 has counts.
        kept: where it is left if the folder can't be written to.
    """
    key = hashlib.blake2b(repr((FORMAT, *parts)).encode(), digest_size=12).hexdigest()
    path, text = _folder() / f"{key}.json", kept.get(key)
    if context.is_main and text is None:
        with contextlib.suppress(OSError, ValueError):  # none, or one that can't be read: the others wait for a word
            text = path.read_text(encoding="utf-8")
    text = context.share_text(text, "looking for a step curve")
    if text:
        try:
            return StepTimes(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            pass  # cut or of another version: measured again
    curve = measured()
    if context.is_main:
        text = json.dumps(asdict(curve))
        try:
            _keep(path, text)
        except OSError as error:
            kept[key] = text
            why = f"{path.parent} cannot be written to ({error.strerror}): set XDG_CACHE_HOME to a folder that is yours"
            warnings.warn(f"the step curve is measured anew for every model that is loaded, since {why}", stacklevel=2)
    return curve


def machine(device: torch.device) -> tuple[Any, ...]:
    """What of this machine and its libraries a step's time depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    versions = torch.__version__, transformers.__version__, platform.python_version()
    return name, torch.get_num_threads(), COMPILED, *versions


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    kind = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {named or platform.processor()} {os.cpu_count()} {kind}"


def _folder() -> Path:
    """As the XDG base directory specification has it: a relative path is as good as none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "lp" / "curves"


def _keep(path: Path, text: str) -> None:
    """Write it whole, or leave nothing."""
    if not path.is_absolute():  # there is no home, and "~" would be a folder right here
        raise FileNotFoundError(errno.ENOENT, "there is no home folder")
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
