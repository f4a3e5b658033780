"""Show a profile as tables, as a line of JSON and as a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .step_profile import Point, Profile
from .terminal import empty_table, put
from .totals import Total

PICTURE = "profile.png"


@dataclass(kw_only=True)
class ProfileResult:
    """The result of `lp profile`: measurements, and the setting in which they were taken.

    Args:
        setting: model, device, decoder and sizes by name.
        found: the measurements.
        speeds: totals of the methods that decoded the same text, by method; empty where speeds were not compared.
        picture: path of the picture; None while there is none.
        note: a line that names the picture, or says why there is none.
    """

    setting: dict[str, Any]
    found: Profile
    speeds: dict[str, Total]
    picture: Path | None = None
    note: str = ""


def as_json(report: ProfileResult) -> str:
    """The result of `lp profile` as one JSON object on one line, for output=json.

    Args:
        report: the result of `lp profile`.
    """
    speeds = {
        name: {"tokens_per_s": total.tokens_per_s, "compression": total.compression}
        for name, total in report.speeds.items()
    }
    picture = None if report.picture is None else str(report.picture)
    return json.dumps({**report.setting, **report.found.as_dict(), "speeds": speeds, "picture": picture})


def print_tables(report: ProfileResult, console: Console) -> None:
    """Print tables of the forward passes, the parts of a step and the methods' speeds, and the setting below them.

    Args:
        report: the result of `lp profile`.
        console: where to print.
    """
    put(_step_times(report.found), console)
    put(_step(report), console)
    if report.speeds:
        put(_speeds(report.speeds), console)
    console.print(caption(report), markup=False, highlight=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    return empty_table(columns, columns[:1], title=title, title_style="bold")


def _step_times(found: Profile) -> Table:
    ceilings = found.ceilings
    first = found.step_times[0].num_tokens
    table = _table("Forward pass", "T", "ms", f"t(T)/t({first})", "x floor", "GB/s", "of copy", "GFLOP/s", "of product")
    for point in found.step_times:
        table.add_row(
            str(point.num_tokens),
            f"{1e3 * point.seconds:.3f}",
            f"{point.ratio:.2f}",
            f"{point.floor:.2f}",
            f"{point.bytes_per_s / 1e9:.1f}",
            f"{point.bytes_per_s / ceilings.bytes_per_s:.0%}",
            f"{point.flop_per_s / 1e9:.0f}",
            f"{point.flop_per_s / ceilings.flop_per_s:.0%}",
        )
    return table


def _step(report: ProfileResult) -> Table:
    step = report.found.step
    setting = report.setting
    table = _table(
        f"A step of rank {setting['rank']} of {setting['R']}: {step.num_tokens} tokens", "part", "ms", "share"
    )
    for name, took in step.parts.items():
        table.add_row(name, f"{1e3 * took:.3f}", f"{step.shares[name]:.1%}")
    table.add_row("all", f"{1e3 * step.seconds:.3f}", "")
    return table


def _speeds(speeds: dict[str, Total]) -> Table:
    table = _table("Decoding the same text, alternated", "method", "tokens/s", "S")
    for name, speed in speeds.items():
        table.add_row(name, f"{speed.tokens_per_s:.1f}", f"{speed.compression:.2f}")
    return table


def caption(report: ProfileResult) -> str:
    """Lines for below the tables: the setting, and how the parts of a step are defined.

    Args:
        report: the result of `lp profile`.
    """
    s = report.setting
    found = report.found
    ceilings = found.ceilings
    least = found.step_times[0].num_tokens
    weights = ", random weights" if s["random"] else ""
    weights_gb = found.work.weight_bytes / 1e9
    lines = [
        f"model {s['model']} ({s['parameters'] / 1e6:.1f} M parameters{weights}), {s['dtype']}, {s['device']}, "
        f"threads: {s['threads']}, attention: {s['attention']}, capture: {s['capture']}, prefix {s['prefix']}, "
        f"W={s['W']} N={s['N']} G={s['G']}, medians of {s['rounds']}",
        f"ceilings of this run: copy {ceilings.bytes_per_s / 1e9:.1f} GB/s, read and written; product "
        f"{ceilings.flop_per_s / 1e9:.0f} GFLOP/s",
        f"t({least}) is {found.over_weights:.2f} x {weights_gb:.3f} GB of weights over the copy's speed",
        "attention: a pass less the same without attention; LM head: timed alone; exchange, host: of the decode loop",
    ]
    if s["R"] > 1 and not found.step.real_exchange:
        lines.append("one rank ran, with the recorded messages of the others: the exchange is a single rank's")
    if not s["compiled"]:
        lines.append("numba is not installed: the host's part is that of plain Python, some 20 times the compiled one")
    if s["random"] and report.speeds:
        lines.append("S of random weights means nothing: compare ms a step, and tokens/s at S = 1")
    if report.note:
        lines.append(report.note)
    return "\n".join(lines)


def draw(report: ProfileResult, folder: Path) -> None:
    """Draw profile.png: the forward passes with the device's limit, and the parts of a step.

    Args:
        report: the result of `lp profile`; this sets its `picture` and `note`.
        folder: where the picture goes.
    """
    try:
        from .plots import figure, look
    except ImportError:  # an image may bring torch and transformers alone
        report.note = "no picture: matplotlib is not installed"
        return
    path = folder / PICTURE
    points = report.found.step_times
    sizes = [point.num_tokens for point in points]
    step = report.found.step
    with figure(path, str(report.setting["model"]), 2.6 + 0.17 * len(step.parts), 2) as (_, (times, parts)):
        times.plot(sizes, [1e3 * point.seconds for point in points], **look(0, "measured"))
        floor = [1e3 * _floor_s(point) for point in points]
        times.plot(sizes, floor, **look(1, "floor by the ceilings") | {"linestyle": "--"})
        times.set(xlabel="tokens (log scale)", ylabel="ms a forward pass", ylim=(0, None))
        times.set_xscale("log", base=2)
        times.set_xticks(sizes, labels=map(str, sizes))
        times.legend()
        parts.barh(list(step.parts), [1e3 * took for took in step.parts.values()], color=look(0, "")["color"])
        parts.set(xlabel=f"ms of a step of {step.num_tokens} tokens")
        parts.invert_yaxis()
    report.picture = path
    report.note = f"picture: {path}"


def _floor_s(point: Point) -> float:
    return point.seconds / point.floor
