"""Plots of rows and of scaling lines, at the width of a paper's column, with model and hardware under them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lp.bench.scaling import PROJECTED, Line

WIDTH_IN, DPI = 3.3, 300  # a column of a two-column paper
STYLE: Any = {
    "font.size": 7,
    "axes.titlesize": 8,
    "axes.labelsize": 7,
    "legend.fontsize": 6,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
}


def new_figure(height_in: float) -> tuple[Any, Any]:
    """A figure of a column's width with one axes, made without any window or global state."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.add_subplot()


def save(figure: Any, caption: str, path: Path) -> Path:
    """As PNG, the caption under it."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure.supxlabel("\n".join(textwrap.wrap(caption, 78)), fontsize=5, color="0.35")
        figure.savefig(path)
    return path


def scaling_plots(lines: Sequence[Line], caption: str, folder: Path) -> list[Path]:
    """Speed-up by ranks, and what a step's time is made of."""
    return [_speedups(lines, caption, folder / "speedup.png"), _step_times(lines, caption, folder / "step_time.png")]


def _speedups(lines: Sequence[Line], caption: str, path: Path) -> Path:
    figure, axes = new_figure(2.7)
    for name in dict.fromkeys(line.series for line in lines):
        mine = sorted((line for line in lines if line.series == name and line.speedup), key=lambda line: line.ranks)
        dashed = mine[0].kind == PROJECTED if mine else False
        axes.plot(
            [line.ranks for line in mine],
            [line.speedup for line in mine],
            marker="o",
            linestyle="--" if dashed else "-",
            markerfacecolor="none" if dashed else None,
            label=name,
        )
    ranks = sorted({line.ranks for line in lines})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(number) for number in ranks])
    axes.set_ylim(bottom=0)
    axes.axhline(1, color="0.7", linewidth=0.6, zorder=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("speed-up over plain decoding\non one device (x)")
    axes.legend(frameon=False)
    return save(figure, caption, path)


def _step_times(lines: Sequence[Line], caption: str, path: Path) -> Path:
    """Bars by series and ranks; of projections, the strong ones over the first link."""
    links = [line.link for line in lines if line.link]
    shown = [line for line in lines if line.link is None or line.link == links[0]]
    figure, axes = new_figure(0.9 + 0.2 * len(shown))
    left = [0.0] * len(shown)
    labels = [f"{line.series}, R={line.ranks}" for line in shown]
    for part, colour in (("forward_ms", "#4477aa"), ("exchange_ms", "#ee6677"), ("host_ms", "#ccbb44")):
        widths = [getattr(line, part) for line in shown]
        hatches = ["////" if line.kind == PROJECTED else "" for line in shown]
        bars = axes.barh(range(len(shown)), widths, left=left, color=colour, label=part.removesuffix("_ms"))
        for bar, hatch in zip(bars, hatches, strict=True):
            bar.set_hatch(hatch)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("time of a step (ms)" + "; hatched: projected" * bool(links))
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.3, 1.0))
    return save(figure, caption, path)
