"""What launch.profile found, as tables, a line of JSON and a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .bench.profile import Point, Profile
from .bench.speed import Speed

PICTURE = "profile.png"


@dataclass(kw_only=True)
class Report:
    """A run.

    Args:
        setting: how it was made.
        found: what was measured.
        speeds: by method; empty where they were not compared.
        picture: where it is.
        note: about it.
    """

    setting: dict[str, Any]
    found: Profile
    speeds: dict[str, Speed]
    picture: Path | None = None
    note: str = ""


def as_json(report: Report) -> str:
    """One line."""
    speeds = {name: asdict(speed) for name, speed in report.speeds.items()}
    picture = None if report.picture is None else str(report.picture)
    return json.dumps({**report.setting, **report.found.as_dict(), "speeds": speeds, "picture": picture})


def print_tables(report: Report, console: Console) -> None:
    """t(T), the parts of a step, tokens a second, and the setting."""
    console.print(_curve(report.found))
    console.print(_step(report))
    if report.speeds:
        console.print(_speeds(report.speeds))
    console.print(caption(report), markup=False, highlight=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def _curve(found: Profile) -> Table:
    ceilings, first = found.ceilings, found.curve[0].rows
    table = _table("Forward pass", "T", "ms", f"t(T)/t({first})", "x floor", "GB/s", "of copy", "GFLOP/s", "of product")
    for point in found.curve:
        table.add_row(
            str(point.rows),
            f"{1e3 * point.seconds:.3f}",
            f"{point.ratio:.2f}",
            f"{point.floor:.2f}",
            f"{point.bytes_per_s / 1e9:.1f}",
            f"{point.bytes_per_s / ceilings.bytes_per_s:.0%}",
            f"{point.flop_per_s / 1e9:.0f}",
            f"{point.flop_per_s / ceilings.flop_per_s:.0%}",
        )
    return table


def _step(report: Report) -> Table:
    step, setting = report.found.step, report.setting
    table = _table(f"A step of rank {setting['rank']} of {setting['R']}: {step.rows} rows", "part", "ms", "share")
    for name, took in step.parts.items():
        table.add_row(name, f"{1e3 * took:.3f}", f"{step.shares[name]:.1%}")
    table.add_row("all", f"{1e3 * step.seconds:.3f}", "")
    return table


def _speeds(speeds: dict[str, Speed]) -> Table:
    table = _table("Decoding the same text, alternated", "method", "tokens/s", "S")
    for name, speed in speeds.items():
        table.add_row(name, f"{speed.tokens_per_s:.1f}", f"{speed.compression:.2f}" if speed.compression else "-")
    return table


def caption(report: Report) -> str:
    """The setting, and what the shares of the step are."""
    s, found = report.setting, report.found
    ceilings, step = found.ceilings, found.step
    drawn, weights = ", random weights" * s["random"], found.work.weight_bytes / 1e9
    lines = [
        f"model {s['model']} ({s['parameters'] / 1e6:.1f} M parameters{drawn}), {s['dtype']}, {s['device']}, threads: "
        f"{s['threads']}, attention: {s['attention']}, capture: {s['capture']}, prefix {s['prefix']}, W={s['W']} "
        f"N={s['N']} G={s['G']}, medians of {s['rounds']}",
        f"ceilings of this run: copy {ceilings.bytes_per_s / 1e9:.1f} GB/s, read and written; product "
        f"{ceilings.flop_per_s / 1e9:.0f} GFLOP/s",
        f"t({found.curve[0].rows}) is {found.over_weights:.2f} x {weights:.3f} GB of weights over the copy's speed",
        "attention: a pass less the same without attention; LM head: timed alone; exchange, host: of the decode loop",
    ]
    if s["R"] > 1 and not step.real_exchange:
        lines.append("one rank ran and heard the others from a tape: the exchange is a single rank's")
    if not s["compiled"]:
        lines.append("numba is not there: the host's part is that of plain Python, some 20 times what it could be")
    if s["random"] and report.speeds:
        lines.append("of random weights S says nothing: compare ms a step, and tokens/s at S = 1")
    if report.note:
        lines.append(report.note)
    return "\n".join(lines)


def draw(report: Report, folder: Path) -> None:
    """A picture of t(T) with its floor and of the parts of a step, into the folder."""
    try:
        from matplotlib.figure import Figure
    except ImportError:  # an image may bring torch and transformers alone
        report.note = "no picture: matplotlib is not installed"
        return
    figure = Figure(figsize=(10, 4), layout="constrained")
    curve, parts = figure.subplots(1, 2, width_ratios=(3, 2))
    rows = [point.rows for point in report.found.curve]
    curve.plot(rows, [1e3 * point.seconds for point in report.found.curve], marker="o", label="measured")
    curve.plot(rows, [1e3 * _floor_s(point) for point in report.found.curve], "--", label="floor by the ceilings")
    curve.set(xlabel="T, rows", ylabel="ms a forward pass", ylim=(0, None), title=f"{report.setting['model']}")
    curve.set_xscale("log", base=2)
    curve.set_xticks(rows, labels=map(str, rows))
    curve.legend()
    step = report.found.step
    parts.barh(list(step.parts), [1e3 * took for took in step.parts.values()])
    parts.set(xlabel="ms", title=f"a step of {step.rows} rows")
    parts.invert_yaxis()
    report.picture = folder / PICTURE
    figure.savefig(report.picture)
    report.note = f"picture: {report.picture}"


def _floor_s(point: Point) -> float:
    return point.seconds / point.floor
