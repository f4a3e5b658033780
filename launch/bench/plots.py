"""Plots of benchmark totals and of scaling, as wide as a column of a paper.

Each plot has model and hardware in its caption, and is saved as PNG and SVG. Projected figures are dashed, hollow or
hatched, and labelled so. The colours are Paul Tol's bright scheme, which colour-blind readers can tell apart. S:
generated tokens per decode step.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure

from lp.budget.step_times import StepTimes

from ..config.builders import ORACLE, PLAIN
from .scaling_lines import PROJECTED, Line
from .totals import Total

WIDTH_IN, DPI = 3.3, 300  # a column of a two-column paper
LINE_IN = 0.085  # of the caption
STYLE: Any = {
    "font.size": 7,
    "axes.labelsize": 7,
    "legend.fontsize": 6,
    "legend.frameon": False,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "lp",
}
LEGEND: dict[str, Any] = {"loc": "outside lower center", "ncols": 2}
ALIKE = 0.02  # relative, of lines that lie on each other
PARTS = ("forward_ms", "exchange_ms", "host_ms")  # of a step
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
# The same in every figure; other methods get the colours that are left, in the order of the figure.
OF_METHODS = ("lookahead_auto", "lookahead", "lookahead_paper", "prompt_lookup", "token_recycling", None, PLAIN, ORACLE)


@contextlib.contextmanager
def figure(path: Path, caption: str, height_in: float, panels: int = 1) -> Iterator[tuple[Figure, list[Any]]]:
    """Draw a figure within the block; at its end it is saved as PNG and SVG, with the caption above the panels.

    Args:
        path: path of the PNG file; the SVG file has the same name, but for the suffix.
        caption: model, hardware and settings; wrapped to the figure's width.
        height_in: height without the caption, in inches.
        panels: number of panels, one below the other.

    Yields:
        matplotlib's figure, and the axes of its panels from top to bottom.
    """
    above = textwrap.wrap(caption, 72)
    with rc_context(STYLE):
        drawn = Figure(figsize=(WIDTH_IN, height_in + LINE_IN * len(above)), dpi=DPI, layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn, list(drawn.subplots(panels, 1, squeeze=False)[:, 0])
        drawn.suptitle("\n".join(above), fontsize=5.5, color="0.35", x=0.01, ha="left")
        drawn.savefig(path)
        drawn.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def look(number: int, label: str) -> dict[str, Any]:
    """matplotlib's arguments for one of several lines in a panel: colour, marker and label.

    Args:
        number: the line's number, from 0; it chooses the colour and the marker.
        label: the line's name in the legend.
    """
    return {"color": COLOURS[number % len(COLOURS)], "marker": "so^vD"[number % 5], "label": label}


def method_numbers(methods: Iterable[str]) -> dict[str, int]:
    """Choose a colour for each method, so that a well-known method has the same colour in all figures.

    Other methods get the colours that are left, in order. When none is left, colours are used again.

    Args:
        methods: names of the methods in a figure, in its order.

    Returns:
        For each method, the colour's index in COLOURS; indices beyond the last colour wrap around to the first.
    """
    methods = list(dict.fromkeys(methods))
    taken = {OF_METHODS.index(method) for method in methods if method in OF_METHODS}
    free = iter([number for number in range(len(COLOURS)) if number not in taken])
    numbers = {method: OF_METHODS.index(method) for method in methods if method in OF_METHODS}
    others = [method for method in methods if method not in numbers]
    return numbers | {method: next(free, len(COLOURS) + at) for at, method in enumerate(others)}


def scaling_plots(lines: Sequence[Line], caption: str, folder: Path) -> list[Path]:
    """Plot a scaling table: speedup.png, the speed-up over the ranks, and step_time.png, the parts of a step's time.

    Args:
        lines: lines of the table, measured and projected.
        caption: hardware, model and settings.
        folder: where the files go.

    Returns:
        Paths of the PNGs.
    """
    return [_speedups(lines, caption, folder / "speedup.png"), _step_times(lines, caption, folder / "step_time.png")]


def _speedups(lines: Sequence[Line], caption: str, path: Path) -> Path:
    names = [name for name in dict.fromkeys(line.series for line in lines) if name not in (PLAIN, ORACLE)]
    by_name = {name: [line for line in lines if line.series == name and line.speedup] for name in names}
    drawn_lines = _without_overlaps([sorted(series, key=lambda line: line.ranks) for series in by_name.values()])
    with figure(path, caption, 2.2 + 0.13 * len(drawn_lines)) as (drawn, (axes,)):
        for number, (label, series) in enumerate(drawn_lines.items()):
            projected = bool(series) and series[0].kind == PROJECTED
            style: dict[str, Any] = {"linestyle": "--", "markerfacecolor": "none"} if projected else {}
            if not _is_line(series):
                style["linestyle"] = "none"
            of_line = style | look(number, label)
            axes.plot([line.ranks for line in series], [line.speedup for line in series], **of_line)
            ranged = [line for line in series if line.least is not None and line.most is not None]
            bars = [(line.speedup, line.least, line.most) for line in ranged]
            _error_bars(axes, [line.ranks for line in ranged], bars, COLOURS[number % len(COLOURS)])
        ranks = sorted({line.ranks for line in lines})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(number) for number in ranks])
        axes.set(xlabel="ranks", ylabel="speed-up over plain\nalone on one device (x)", ylim=(0, None))
        axes.axhline(1, color="0.7", linewidth=0.6, zorder=0)
        if drawn_lines:  # none where plain decoding alone was measured
            drawn.legend(**LEGEND | {"ncols": 1})
    return path


def _is_line(series: Sequence[Line]) -> bool:
    """Whether a series' points differ in ranks alone, so that they may be joined by a line."""
    return len({(line.W, line.G) for line in series}) == 1 and len({line.ranks for line in series}) == len(series)


def _without_overlaps(all_series: Sequence[Sequence[Line]]) -> dict[str, Sequence[Line]]:
    """Series of speed-ups by label; projections over several links that nobody could tell apart are one series."""
    kept: list[tuple[Sequence[Line], list[str]]] = []
    for series in filter(None, all_series):
        link = series[0].link
        same = [
            links for other, links in kept if link and other[0].method == series[0].method and _alike(other, series)
        ]
        if same:
            same[0].append(str(link))
        else:
            kept.append((series, [link] if link else []))
    return {
        f"{series[0].method}, {' = '.join(links)} (projected)" if links else series[0].series: series
        for series, links in kept
    }


def _alike(one: Sequence[Line], other: Sequence[Line]) -> bool:
    """Whether two projections differ by less than a marker's size."""
    both = zip(one, other, strict=False)
    same_ranks = one[0].link and other[0].link and [line.ranks for line in one] == [line.ranks for line in other]
    return bool(same_ranks) and all(
        abs((a.speedup or 0) - (b.speedup or 0)) < ALIKE * (a.speedup or 0) for a, b in both
    )


def _error_bars(axes: Any, places: Sequence[float], values: Sequence[tuple[Any, Any, Any]], colour: str) -> None:
    """Bars from the least to the most over several rounds; `values` has (middle, least, most) for each place."""
    if values:
        middles = [middle for middle, _, _ in values]
        below = [max(0.0, middle - least) for middle, least, _ in values]
        above = [max(0.0, most - middle) for middle, _, most in values]
        axes.errorbar(places, middles, (below, above), fmt="none", ecolor=colour, elinewidth=0.7, capsize=1.5)


def _step_times(lines: Sequence[Line], caption: str, path: Path) -> Path:
    """A bar for each series and number of ranks; of projections, only those over the first link."""
    links = [line.link for line in lines if line.link]
    of_link = [line for line in lines if line.link is None or line.link == links[0]]
    shown = [*{(line.series, line.ranks): line for line in of_link}.values()]
    with figure(path, caption, 0.95 + 0.17 * len(shown)) as (drawn, (axes,)):
        left = [0.0] * len(shown)
        heights = range(len(shown))
        for part, colour in zip(PARTS, COLOURS, strict=False):
            widths = [getattr(line, part) for line in shown]
            bars = axes.barh(heights, widths, left=left, color=colour, label=part.removesuffix("_ms"))
            for bar, line in zip(bars, shown, strict=True):
                bar.set_hatch("////" if line.kind == PROJECTED else "")
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(heights, [f"{line.series}, R={line.ranks}" for line in shown])
        axes.invert_yaxis()
        axes.set_xlabel("ms a step (hatched: projected)" if links else "ms a step")
        drawn.legend(**LEGEND | {"ncols": 3})
    return path


def tune_plot(
    step_times: StepTimes,
    by_budget: Sequence[tuple[float, float]],
    adaptive: tuple[float, float],
    caption: str,
    path: Path,
) -> Path:
    """Plot the result of `lp tune`: step time over tokens per step, and each setting's S over its mean tokens per step.

    S: generated tokens per decode step.

    Args:
        step_times: seconds of a decode step by its number of tokens. Two curves show them: as measured, and rounded up
            to the sizes that the decoder uses.
        by_budget: (mean tokens per step, S) of each setting without a lookahead window.
        adaptive: (mean tokens per step, S) of the adaptive decoder.
        caption: model, hardware and task.
        path: where the PNG goes.

    Returns:
        `path`.
    """
    with figure(path, caption, 4.2, 2) as (_, (times, brought)):
        times.plot(step_times.num_tokens, [1e3 * s for s in step_times.seconds], **look(0, "measured") | {"ls": "none"})
        sizes = range(1, step_times.max_tokens + 1)
        times.plot(sizes, [1e3 * step_times.step_s(size) for size in sizes], color=COLOURS[0], label="used, padded")
        times.plot([1], [1e3 * step_times.plain_s], **look(6, "plain step") | {"ls": "none"})
        times.set(xlabel="tokens a step", ylabel="ms a step", ylim=(0, None))
        brought.plot(*zip(*by_budget, strict=True), **look(1, "lookahead, W = 0, by G") | {"ls": "none"})
        brought.plot(*adaptive, **look(0, "lookahead_auto") | {"ls": "none", "markersize": 5})
        highest = max(s for _, s in [*by_budget, adaptive])
        brought.set_xscale("log", base=2)
        brought.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        brought.set(xlabel="tokens a step (log scale)", ylabel="S (generated tokens a step)", ylim=(0, 1.08 * highest))
        times.legend()
        brought.legend(loc="lower right")
    return path


def dataset_plot(found: Sequence[Total], caption: str, path: Path) -> Path:
    """Plot S (generated tokens per decode step) and the speed-up over plain decoding, by task and method.

    Args:
        found: totals by task and method, all under one setting.
        caption: model, hardware and settings.
        path: where the PNG goes.

    Returns:
        `path`.
    """
    tasks = list(dict.fromkeys(total.task for total in found))
    methods = list(dict.fromkeys(total.method for total in found))
    width = 0.8 / len(methods)
    numbers = method_numbers(methods)
    with figure(path, caption, 3.2, 2) as (drawn, (upper, lower)):
        for number, method in enumerate(methods):
            by_task = {total.task: total for total in found if total.method == method}
            centres = [tasks.index(task) + (number - (len(methods) - 1) / 2) * width for task in by_task]
            colour = COLOURS[numbers[method] % len(COLOURS)]
            upper.bar(centres, [total.compression for total in by_task.values()], width, color=colour, label=method)
            lower.bar(centres, [total.speedup or 0 for total in by_task.values()], width, color=colour)
            several = [(at, t) for at, t in zip(centres, by_task.values(), strict=True) if len(t.speedups) > 1]
            bars = [(total.speedup, min(total.speedups), max(total.speedups)) for _, total in several]
            _error_bars(lower, [at for at, _ in several], bars, "black")
        upper.set_ylabel("S (tokens a step)")
        lower.set_ylabel("speed-up over\nplain (x)")
        for axes in (upper, lower):
            axes.set_xticks(range(len(tasks)), tasks)
            axes.axhline(1, color="0.7", linewidth=0.6, zorder=0)
        drawn.legend(**LEGEND)
    return path


def heat_map(found: Sequence[Total], caption: str, path: Path) -> Path:
    """Plot one method's speed-up over window size W and n-gram size N, with the best guess set size G in each cell.

    A cell's colour and figure are those of its best G. If plain decoding did not run, S (generated tokens per decode
    step) takes the place of the speed-up.

    Args:
        found: totals of one method under settings that differ in W, N and G.
        caption: model, hardware and task.
        path: where the PNG goes.

    Returns:
        `path`.
    """
    timed = all(total.speedup for total in found)

    def value(total: Total) -> float:
        return (total.speedup if timed else None) or total.compression

    best: dict[tuple[int, int], Total] = {}
    for total in found:
        at = (total.setting["W"], total.setting["N"])
        best[at] = max(best.get(at, total), total, key=value)
    widths, sizes = (sorted({at[axis] for at in best}) for axis in (0, 1))
    grid = [[value(best[w, n]) if (w, n) in best else float("nan") for w in widths] for n in sizes]
    with figure(path, caption, 1.4 + 0.4 * len(sizes)) as (drawn, (axes,)):
        image = axes.imshow(grid, aspect="auto", origin="lower", **_colours([value(total) for total in best.values()]))
        for (w, n), total in best.items():
            red, green, blue, _ = image.cmap(image.norm(value(total)))
            colour = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
            text = f"{value(total):.2f}\nG={total.guess_set_size}"
            axes.text(widths.index(w), sizes.index(n), text, ha="center", va="center", fontsize=5.5, color=colour)
        axes.set_xticks(range(len(widths)), map(str, widths))
        axes.set_yticks(range(len(sizes)), map(str, sizes))
        axes.set(xlabel="W, columns of the window", ylabel="N, tokens of an n-gram")
        quantity = "speed-up over plain decoding (x)" if timed else "S (generated tokens a step)"
        drawn.colorbar(image, ax=axes).set_label(f"{found[0].method}:\n{quantity}", fontsize=6)
    return path


def _colours(values: Sequence[float]) -> dict[str, Any]:
    """A colour scale that is white at 1, no gain and no loss, and symmetric: 0.5 and 2 are equally dark."""
    far = max(1.1, *(max(value, 1 / value) if value > 0 else 1.1 for value in values))
    norm = FuncNorm((lambda x: np.log(np.maximum(x, 1e-9)), np.exp), vmin=1 / far, vmax=far)
    return {"cmap": "PuOr", "norm": norm}


LENGTHS = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 7), (8, 15), (16, 31), (32, 10**6))  # of accepted drafts, in one bar


def accepted_plot(found: Sequence[Total], caption: str, path: Path) -> Path:
    """Plot how many draft tokens the decode steps of each method accept, as shares of the method's steps.

    Args:
        found: totals by method.
        caption: model, hardware and settings.
        path: where the PNG goes.

    Returns:
        `path`.
    """
    names = [str(low) if low == high else f"{low}-{high}" for low, high in LENGTHS[:-1]] + [f"{LENGTHS[-1][0]}+"]
    width = 0.84 / len(found)
    numbers = method_numbers(total.method for total in found)
    with figure(path, caption, 2.5) as (drawn, (axes,)):
        for number, total in enumerate(found):
            counts = total.accepted
            shares = [sum(counts[n] for n in counts if low <= n <= high) / total.steps for low, high in LENGTHS]
            centres = [at + (number - (len(found) - 1) / 2) * width for at in range(len(LENGTHS))]
            colour = COLOURS[numbers[total.method] % len(COLOURS)]
            axes.bar(centres, shares, width, color=colour, label=total.method)
        axes.set_xticks(range(len(names)), names)
        axes.set(xlabel="draft tokens that a step accepts", ylabel="share of the steps")
        drawn.legend(**LEGEND)
    return path


def time_plot(found: Sequence[Total], caption: str, path: Path) -> Path:
    """Plot the mean time of a decode step, split into forward pass, exchange and host, with a bar for each method.

    Args:
        found: totals by method.
        caption: model, hardware and settings.
        path: where the PNG goes.

    Returns:
        `path`.
    """
    with figure(path, caption, 1.0 + 0.2 * len(found)) as (drawn, (axes,)):
        left = [0.0] * len(found)
        for part, colour in zip(PARTS, COLOURS, strict=False):
            widths = [total.a_step(part) for total in found]
            axes.barh(range(len(found)), widths, left=left, color=colour, label=part.removesuffix("_ms"))
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(found)), [total.method for total in found])
        axes.invert_yaxis()
        axes.set_xlabel("ms a step (S: generated tokens a step)")
        for at, (total, end) in enumerate(zip(found, left, strict=True)):
            axes.text(end, at, f" S = {total.compression:.2f}", va="center", fontsize=5.5)
        axes.set_xlim(0, 1.25 * max(left))
        drawn.legend(**LEGEND | {"ncols": 3})
    return path


def tokens_plot(found: Sequence[Total], caption: str, path: Path) -> Path:
    """Plot S (generated tokens per decode step) over the tokens that a step computes, with a point for each setting.

    The axis of computed tokens is logarithmic: the paper's scaling law is a straight line on it.

    Args:
        found: totals of lookahead methods under settings that differ in W, N or G.
        caption: model, hardware and task.
        path: where the PNG goes.

    Returns:
        `path`.
    """
    with figure(path, caption, 2.5) as (drawn, (axes,)):
        for method, number in method_numbers(total.method for total in found).items():
            of_method = sorted((t for t in found if t.method == method), key=lambda total: total.tokens_a_step)
            step_tokens = [total.tokens_a_step for total in of_method]
            compressions = [total.compression for total in of_method]
            axes.plot(step_tokens, compressions, linestyle="none", **look(number, method))  # of different W, N and G
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        highest = max(total.compression for total in found)
        axes.set(xlabel="tokens a step (log scale)", ylabel="S (generated tokens a step)", ylim=(0, 1.08 * highest))
        drawn.legend(**LEGEND)
    return path
