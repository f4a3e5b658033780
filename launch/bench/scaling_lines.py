"""Lines of a scaling table: a method on R ranks, measured in launches or projected from one device.

A replica is a copy of the model, held by one rank or by `tp` ranks between them. S: generated tokens per decode step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from ..config.builders import ALONE, ORACLE, PLAIN
from .projection import Link, Projected
from .records import Record
from .table_text import spread
from .totals import Total, totals

MEASURED, PROJECTED = "measured", "projected"
ErrorsOfRuns = dict[tuple[str, int], list[float]]  # by method and ranks
SPREAD = "of rounds"
IN_LAUNCH = "vs plain of the launch"
HEADS = (
    *("method", "ranks", "tp", "kind", "W", "G", "tokens/s", "vs plain", SPREAD, IN_LAUNCH, "efficiency", "S"),
    "step tokens",
    *("forward ms", "exchange ms", "host ms"),
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the scaling table: the speed of a method on R ranks, measured or projected.

    Args:
        method: name of the method.
        ranks: R, how many ranks there are.
        kind: MEASURED or PROJECTED.
        link: name of the link that a projection assumes, followed by ", weak" where W and G grow with the ranks; None
            for a measured line.
        W: window size of all ranks together; None for methods without a lookahead window.
        G: guess set size of all ranks together; None for methods without a guess set.
        tokens_per_s: decoding speed.
        speedup: this speed divided by that of plain decoding on one replica (model copy) with nothing else running;
            None if plain decoding was not measured.
        compression: S, generated tokens per decode step.
        num_tokens: tokens per step on the rank that computes most, the mean over the steps.
        forward_ms: milliseconds per step in the forward pass: mean of the measured ranks, or the slowest projected
            rank's.
        exchange_ms: milliseconds per step in collectives: mean of the measured ranks, or computed for the link.
        host_ms: milliseconds per step on the host: mean of the measured ranks, or the slowest projected rank's.
        efficiency: `speedup` divided by the number of replicas and by the method's speed-up on one replica, which
            counts as 1 where it was not measured: 1.0 is perfect scaling.
        tp: how many ranks hold one replica between them; 1 where each rank has its own.
        least: least speed-up in several rounds or runs; None after a single one.
        most: largest speed-up in several rounds or runs; None after a single one.
        launch: world size of the launch in which the line was measured; None if projected.
        speedup_in_launch: speed divided by that of plain decoding in the same launch, whose ranks may share cores; None
            if projected.
    """

    method: str
    ranks: int
    kind: str
    link: str | None
    W: int | None
    G: int | None
    tokens_per_s: float
    speedup: float | None
    compression: float
    num_tokens: float
    forward_ms: float
    exchange_ms: float
    host_ms: float
    efficiency: float | None = None
    tp: int = 1
    least: float | None = None
    most: float | None = None
    launch: int | None = None
    speedup_in_launch: float | None = None

    @property
    def shares_the_machine(self) -> bool:
        """Whether the method ran on only some of a launch's ranks, so that the others may have taken cores from it."""
        return self.launch is not None and self.launch > self.ranks

    @property
    def series(self) -> str:
        """The name of the curve in a plot to which this line's point belongs, as in "lookahead, tp 2"."""
        if self.tp > 1:
            return f"{self.method}, tp {self.tp}"
        return self.method if self.link is None else f"{self.method}, {self.link} (projected)"

    def figures(self) -> dict[str, Any]:
        """All fields by name, for a line of CSV or JSON."""
        return asdict(self)

    def cells(self) -> list[str]:
        """The line's cells as text, in the order of HEADS, the column heads of the table."""
        kind = self.kind if self.link is None else f"**{self.kind}**, {self.link}"
        shape = ["-" if value is None else str(value) for value in (self.W, self.G)]
        speeds = ["-" if self.speedup is None else f"{self.speedup:.2f}x"]
        speeds += ["-" if self.least is None or self.most is None else spread([self.least, self.most])]
        speeds += ["-" if self.speedup_in_launch is None else f"{self.speedup_in_launch:.2f}x"]
        speeds += ["-" if self.efficiency is None else f"{self.efficiency:.0%}", f"{self.compression:.2f}"]
        times = [f"{value:.2f}" for value in (self.forward_ms, self.exchange_ms, self.host_ms)]
        method = f"{self.method}, in a launch of {self.launch}" if self.shares_the_machine else self.method
        head = [method, str(self.ranks), str(self.tp), kind, *shape, f"{self.tokens_per_s:.1f}"]
        return [*head, *speeds, f"{self.num_tokens:.1f}", *times]


def scaling_table(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Column heads and cells of a scaling table, without columns that would be empty.

    The range of speed-ups over rounds is empty after a single round. The speed-up within a launch is left out unless a
    method ran on only some of its launch's ranks.

    Args:
        lines: the lines of the table.
    """
    heads, cells = [*HEADS], [line.cells() for line in lines]
    empty = {
        SPREAD: all(line.least is None for line in lines),
        IN_LAUNCH: not any(line.shares_the_machine for line in lines),
    }
    for head in (head for head, is_empty in empty.items() if is_empty):
        column = heads.index(head)
        for each in (heads, *cells):
            del each[column]
    return heads, cells


def plain_rate(records: Sequence[Record]) -> float | None:
    """Tokens/s of plain decoding in one launch; None if plain decoding did not run.

    Args:
        records: records of the launch.
    """
    plain = totals(records)[0].plain
    return plain.tokens_per_s if plain else None


def measured_lines(records: Sequence[Record], alone: float | None = None) -> list[Line]:
    """Make the lines of the scaling table for one launch, a line for each method.

    Args:
        records: records of the launch.
        alone: tokens/s of plain decoding with nothing else running, by which a method's speed is divided; None takes
            plain decoding in this launch.
    """
    lines = []
    for total in totals(records):
        names = ("forward_ms", "exchange_ms", "host_ms")
        means = {name: _a_step(total, name, fmean) for name in names}
        shaped = total.method.startswith("lookahead")
        tp = total.setting.get("tp", 1)
        line = Line(
            method=total.method,
            ranks=tp if total.method in (PLAIN, ORACLE) or "@" in total.method else total.setting["ranks"],
            tp=tp,
            kind=MEASURED,
            link=None,
            W=total.setting["W"] if shaped else None,
            G=total.guess_set_size if shaped else None,
            tokens_per_s=total.tokens_per_s,
            speedup=total.tokens_per_s / alone if alone else total.speedup,
            compression=total.compression,
            num_tokens=_a_step(total, "num_tokens", max),
            launch=total.setting["ranks"],
            speedup_in_launch=total.speedup,
            **means,
            **_range([rate / alone for rate in total.rates] if alone and total.speedups else total.speedups),
        )
        lines.append(line)
    return lines


def _range(speedups: Sequence[float]) -> dict[str, float]:
    """Least and most of several speed-ups, as fields of a `Line`; nothing for a single one."""
    return {"least": min(speedups), "most": max(speedups)} if len(speedups) > 1 else {}


def _a_step(total: Total, name: str, of_ranks: Callable[[list[float]], float]) -> float:
    """Mean over all steps of a figure that records have for each rank; `of_ranks` makes one figure of the ranks'."""
    sums = (record["steps"] * of_ranks([split[name] for split in record["split"]]) for record in total.records)
    return sum(sums) / max(total.steps, 1)


def projected_lines(
    found: Sequence[Projected], links: Mapping[str, Link], plain: float, weak: bool, shape: tuple[int, int]
) -> list[Line]:
    """Make the projected lines of the scaling table for one number of ranks, a line for each link.

    Args:
        found: one projection for each prompt, all on this number of ranks.
        links: models of the links by name.
        plain: tokens/s of plain decoding on this device, by which the projected speed is divided.
        weak: whether W and G grow with the number of ranks; the links' names then end with ", weak".
        shape: (W, G) for all ranks together.
    """
    ranks = found[0].ranks
    tokens = sum(one.tokens for one in found)
    steps = sum(one.steps for one in found)
    lines = []
    for name, link in links.items():
        seconds = sum(one.decode_s(link) for one in found)
        compute = sum(one.compute_s for one in found)
        line = Line(
            method="lookahead",
            ranks=ranks,
            kind=PROJECTED,
            link=f"{name}, weak" if weak else name,
            W=shape[0],
            G=shape[1],
            tokens_per_s=tokens / seconds,
            speedup=tokens / seconds / plain,
            compression=tokens / steps,
            num_tokens=sum(one.num_tokens * one.steps for one in found) / steps,
            forward_ms=1e3 * sum(one.forward_s for one in found) / steps,
            exchange_ms=1e3 * (seconds - compute) / steps,
            host_ms=1e3 * sum(one.host_s for one in found) / steps,
        )
        lines.append(line)
    return lines


def with_efficiency(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with their efficiency: speed-up / (speed-up of a single replica x number of replicas).

    A replica is a copy of the model, so 1.0 is perfect scaling.

    Args:
        lines: all lines of the table. The single replica's speed-up is that of the method's line on one replica, else
            that of its "@1" line, else 1.
    """
    of_launches = {line.series: line.speedup for line in lines if line.ranks == line.tp and line.speedup}
    beside: dict[tuple[str, int | None, int | None], list[float]] = defaultdict(list)  # of @1 in larger launches
    for line in lines:
        if line.method.endswith(ALONE) and line.speedup:
            beside[line.series, line.W, line.G].append(line.speedup)
    found = []
    for line in lines:
        if line.ranks == line.tp:
            base = line.speedup
        else:
            single = replace(line, method=line.method + ALONE).series, line.W, line.G
            base = of_launches.get(line.series) or median(beside.get(single, [1.0]))
        efficiency = line.speedup / base / (line.ranks // line.tp) if line.speedup and base else None
        found.append(replace(line, efficiency=efficiency))
    return found


def medians(runs: Sequence[Sequence[Line]]) -> list[Line]:
    """Combine the tables of several runs of one command: each figure of a line becomes the median over the runs.

    Args:
        runs: lines of each run, in the same order in every run.
    """
    return [_median(of_runs) for of_runs in zip(*runs, strict=True)]


def _median(lines: Sequence[Line]) -> Line:
    names = (
        "tokens_per_s",
        "speedup",
        "speedup_in_launch",
        "compression",
        "num_tokens",
        "forward_ms",
        "exchange_ms",
        "host_ms",
    )
    found = {name: [getattr(line, name) for line in lines] for name in names}
    middle: dict[str, Any] = {name: median(each) for name, each in found.items() if None not in each}
    speedups = [line.speedup for line in lines if line.speedup]
    return replace(lines[0], **(middle | _range(speedups)))


def errors_of_runs(runs: Sequence[Sequence[Line]]) -> ErrorsOfRuns:
    """Relative errors of the projected speed-ups, by (method, ranks), one for each run: see `errors`.

    Args:
        runs: lines of each run.
    """
    found = [errors(lines) for lines in runs]
    return {key: [each[key] for each in found] for key in found[0]}


def errors(lines: Iterable[Line], link: str = "gloo") -> dict[tuple[str, int], float]:
    """Relative error of the projected speed-ups, projected / measured - 1, by (method, ranks); 0.05 is 5% too high.

    A measured speed-up is over plain decoding in the same launch, where plain decoding has no more of the machine's
    cores than each rank has.

    Args:
        lines: lines of one run. Measured and projected lines with equal method, ranks, W and G are compared.
        link: name of the link whose projections are compared; those over other links are skipped.
    """
    speedups: dict[tuple[str, int, int | None, int | None], dict[str, float]] = {}
    for line in lines:
        speedup = line.speedup_in_launch or line.speedup
        if speedup and line.tp == 1 and line.link in (None, link):
            speedups.setdefault((line.method, line.ranks, line.W, line.G), {})[line.kind] = speedup
    return {key[:2]: pair[PROJECTED] / pair[MEASURED] - 1 for key, pair in speedups.items() if len(pair) == 2}
