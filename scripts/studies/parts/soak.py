"""Whether a server's memory, file handles and threads stay where they are: samples over time, and a verdict.

What a process holds goes up and down with its load, and neighbouring samples are alike. So the samples behind the
warm-up are averaged in blocks, and a line is fitted to the blocks.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from lp.errors import UserError

WARM_UP = 0.25  # of the samples, in which pools fill and kernels are compiled
BLOCKS = 12
STUDENT_T = 2.228  # 97.5 % of Student's t with BLOCKS - 2 degrees of freedom
GROWTH = 0.02  # of the mean, that counts as none
ROOM = 8  # handles or threads, that a few connections take more or less
HELD = ("resident_bytes", "handles", "threads")  # what samples hold


@dataclass(frozen=True)
class Sample:
    """What all processes of a server hold, and what it has done so far.

    Attributes:
        t_s: seconds since the load began.
        processes: number of the server's processes.
        resident_bytes, handles, threads: memory, open files and threads of all processes together.
        answers: number of requests that were answered.
        failures: number of requests that failed and were not meant to.
    """

    t_s: float
    processes: int
    resident_bytes: int
    handles: int
    threads: int
    answers: int
    failures: int

    def as_record(self) -> dict[str, float]:
        """The sample's values by name, to be written as a line of JSON."""
        return asdict(self)


def resident_bytes(process: int | str = "self") -> int | None:
    """A process's resident memory now, in bytes; None where the system does not report it.

    Args:
        process: id of the process; "self" is this one.
    """
    statm = Path(f"/proc/{process}/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None


def take_sample(root: int, t_s: float, answers: int, failures: int) -> Sample:
    """What a process and its descendants hold now; those that end meanwhile are left out.

    Args:
        root: the process's id.
        t_s, answers, failures: what the sample is to say of the time and of the load.
    """
    held = []
    for process in descendants(root):
        try:
            folder = Path("/proc", str(process))
            handles, threads = len([*(folder / "fd").iterdir()]), len([*(folder / "task").iterdir()])
            held.append((resident_bytes(process) or 0, handles, threads))
        except OSError:
            continue
    memory, handles, threads = (sum(each[index] for each in held) for index in range(3))
    return Sample(round(t_s, 2), len(held), memory, handles, threads, answers, failures)


def descendants(root: int) -> list[int]:
    """The ids of a process and of all processes that it or its descendants started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


class Slope(NamedTuple):
    """How fast a quantity of a server grows, by a line through its samples, and how sure that is.

    Attributes:
        mean: mean value of the samples behind the warm-up.
        per_hour: growth in an hour, in the quantity's unit.
        margin: half the width of the growth's interval of 95 %.
        hours: time from the mean of the first block to that of the last.
    """

    mean: float
    per_hour: float
    margin: float
    hours: float

    @property
    def growth(self) -> tuple[float, float]:
        """The interval of the growth over the run, as a share of the mean."""
        scale = self.hours / max(self.mean, 1e-9)
        return (self.per_hour - self.margin) * scale, (self.per_hour + self.margin) * scale


def check_count(samples: int) -> None:
    """Refuse a run that decides nothing.

    Raises:
        UserError: fewer than 2 samples a block.
    """
    kept = samples - int(samples * WARM_UP)
    if kept < 2 * BLOCKS:
        raise UserError(f"{kept} samples behind the warm-up; {2 * BLOCKS} are needed: take a longer time")


def slope(samples: Sequence[Sample], name: str) -> Slope:
    """Fit a line to one quantity of the samples behind the warm-up.

    Args:
        samples: all samples of the run, by time.
        name: the quantity, one of HELD.

    Raises:
        UserError: fewer than 2 samples a block.
    """
    check_count(len(samples))
    kept = samples[int(len(samples) * WARM_UP) :]
    ends = [len(kept) * block // BLOCKS for block in range(BLOCKS + 1)]
    blocks = [kept[start:end] for start, end in itertools.pairwise(ends)]
    hours = [sum(each.t_s for each in block) / len(block) / 3600 for block in blocks]
    values = [sum(getattr(each, name) for each in block) / len(block) for block in blocks]
    mean_x, mean_y = sum(hours) / BLOCKS, sum(values) / BLOCKS
    spread = sum((x - mean_x) ** 2 for x in hours)
    per_hour = sum((x - mean_x) * (y - mean_y) for x, y in zip(hours, values, strict=True)) / spread
    left = sum((y - mean_y - per_hour * (x - mean_x)) ** 2 for x, y in zip(hours, values, strict=True))
    margin = STUDENT_T * math.sqrt(left / (BLOCKS - 2) / spread)
    return Slope(mean_y, per_hour, margin, hours[-1] - hours[0])


def verdict(samples: Sequence[Sample]) -> tuple[str, list[str]]:
    """Whether a server is as large as it was: "flat", "grows" or "undecided"; and a line for each of HELD.

    A quantity is flat where the interval of its growth over the run ends below GROWTH of its mean (or ROOM, of handles
    and threads), and grows where the interval begins above that.
    """
    found, lines = [], []
    for name in HELD:
        fitted = slope(samples, name)
        least, most = fitted.growth
        allowed = GROWTH if name == HELD[0] else max(GROWTH, ROOM / max(fitted.mean, 1e-9))
        found.append("flat" if most <= allowed else "grows" if least > allowed else "undecided")
        lines.append(
            f"{name}: {found[-1]}; mean {fitted.mean:.4g}, {fitted.per_hour:+.3g} +- {fitted.margin:.2g} an hour, "
            f"in the run {100 * least:+.2f} % to {100 * most:+.2f} %"
        )
    return next(each for each in ("grows", "undecided", "flat") if each in found), lines
