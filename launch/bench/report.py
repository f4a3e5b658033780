"""A folder of results as plots and one HTML file, which opens without a network."""

from __future__ import annotations

import base64
import csv
import html
import json
from collections.abc import Sequence
from pathlib import Path

from .plots import dataset_plot, heat_map, rows_plot, scaling_plots
from .records import load_rows
from .scaling import HEADS as SCALING_HEADS
from .scaling import Line
from .summary import HEADS, PLAIN, Total, caption, cells, common, ordered, totals, varying

STYLE = """body { font: 15px/1.4 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .7em; border-bottom: 1px solid #ddd }
td { font-variant-numeric: tabular-nums } th { text-align: left } img { width: 26em; max-width: 100% }
figure { display: inline-block; margin: 1em 1em 1em 0 } pre { white-space: pre-wrap; font-size: 12px }"""


def write_report(folder: Path) -> list[Path]:
    """Make the plots that the results allow, and report.html with these, the tables and the settings.

    Args:
        folder: of launch.benchmark or launch.scaling; subfolders count.

    Returns:
        What was written.

    Raises:
        ValueError: no results there.
    """
    lines = read_lines(folder / "scaling.csv")
    found = ordered(totals(load_rows(folder))) if any(folder.rglob("*.jsonl")) or not lines else []
    said = caption(found) if found else (folder / "scaling.md").read_text(encoding="utf-8").split("\n\n")[1].strip()
    parts, pictures = [f"<h1>{html.escape(folder.resolve().name)}</h1><p>{html.escape(said)}</p>"], list[Path]()
    if found:
        parts.append(_table([*_shown(found), *HEADS], [cells(total, _shown(found)) for total in found]))
        pictures += _plots(found, folder)
    if lines:
        parts.append(_table(SCALING_HEADS, [line.cells() for line in lines]))
        pictures += scaling_plots(lines, said, folder)
    parts += [_picture(path) for path in pictures]
    if found:
        parts.append(f"<h2>Settings</h2><pre>{html.escape(_settings(found))}</pre>")
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>lp</title><style>{STYLE}</style>'
    report = folder / "report.html"
    report.write_text(page + "\n".join(parts) + "</html>\n", encoding="utf-8")
    return [*pictures, report]


def read_lines(path: Path) -> list[Line]:
    """The lines of a scaling.csv; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [_line(record) for record in csv.DictReader(file)]


def _line(record: dict[str, str]) -> Line:
    words, whole = ("method", "kind", "link"), ("ranks", "W", "G")
    read = {name: str if name in words else int if name in whole else float for name in record}
    return Line(**{name: read[name](text) if text else None for name, text in record.items()})  # type: ignore[arg-type]


def _plots(found: Sequence[Total], folder: Path) -> list[Path]:
    """By task where one setting was run on them; over W, N and rows where these vary."""
    differ, said, made = varying(found), caption(found), list[Path]()
    ours = [total for total in found if total.method.startswith("lookahead")]
    if not {"W", "N", "G", "ranks"} & {*differ}:
        made.append(dataset_plot([t for t in found if t.method != PLAIN] or found, said, folder / "by_task.png"))
    if {"W", "N"} & {*differ} and ours:
        first = [total for total in ours if total.method == ours[0].method]
        made.append(heat_map(first, said, folder / "heat_map.png"))
    if {"W", "N", "G"} & {*differ} and ours:
        made.append(rows_plot(ours, said, folder / "rows.png"))
    return made


def _shown(found: Sequence[Total]) -> list[str]:
    return [name for name in varying(found) if name not in ("decoder", "methods", "chat", "parameters")]


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    lines = ("".join(f"<td>{html.escape(cell.replace('**', ''))}</td>" for cell in line) for line in body)
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    name = html.escape(path.stem.replace("_", " "))
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"></figure>'


def _settings(found: Sequence[Total]) -> str:
    versions = found[0].rows[0]["versions"]
    return json.dumps({"hardware": found[0].hardware, "versions": versions, "settings": common(found)}, indent=2)
