"""A folder of results as plots and one HTML file, which opens without a network."""

from __future__ import annotations

import base64
import csv
import html
import json
from collections.abc import Sequence
from pathlib import Path

from ..builders import ORACLE, PLAIN
from .plots import accepted_plot, dataset_plot, heat_map, scaling_plots, time_plot, tokens_plot
from .records import load_records
from .scaling import Line, scaling_table
from .summary import Total, caption, common, notes, ordered, table_of, totals, varying

STYLE = """body { font: 15px/1.4 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .7em; border-bottom: 1px solid #ddd }
td { font-variant-numeric: tabular-nums } th { text-align: left } img { width: 26em; max-width: 100% }
figure { display: inline-block; margin: 1em 1em 1em 0 } pre { white-space: pre-wrap; font-size: 12px }"""


def write_report(folder: Path) -> list[Path]:
    """Make the plots that the results allow, and report.html with these, the tables and the settings.

    Args:
        folder: of launch.benchmark or launch.scaling; subfolders count.

    Returns:
        The files written.

    Raises:
        ValueError: no results there.
    """
    lines = read_lines(folder / "scaling.csv")
    found = ordered(totals(load_records(folder))) if any(folder.rglob("*.jsonl")) or not lines else []
    if found:
        setting = "; ".join([caption(found), *notes(found)])
    else:
        setting = (folder / "scaling.md").read_text(encoding="utf-8").split("\n\n")[1].strip()
    parts = [f"<h1>{html.escape(folder.resolve().name)}</h1><p>{html.escape(setting)}</p>"]
    pictures: list[Path] = []
    if found:
        parts.append(_table(*table_of(found)))
        pictures += _plots(found, setting, folder)
    if lines:
        parts.append(_table(*scaling_table(lines)))
        pictures += scaling_plots(lines, setting, folder)
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
    types = dict.fromkeys(("method", "kind", "link"), str) | dict.fromkeys(("ranks", "tp", "W", "G"), int)
    values = {name: types.get(name, float)(text) if text else None for name, text in record.items()}
    return Line(**values)  # type: ignore[arg-type]


def _plots(found: Sequence[Total], setting: str, folder: Path) -> list[Path]:
    """By task where one setting was run on them; over W, N and step tokens where these vary."""
    differ = {*varying(found)}
    pictures: list[Path] = []
    ours = [total for total in found if total.method.startswith("lookahead")]
    if not {"W", "N", "G", "ranks"} & differ:
        others = [total for total in found if total.method not in (PLAIN, ORACLE)]
        pictures.append(dataset_plot(others or found, setting, folder / "by_task.png"))
        first = [total for total in found if total.task == found[0].task]
        if drafting := [total for total in first if max(total.accepted, default=0) > 0]:
            pictures.append(accepted_plot(drafting, setting, folder / "accepted.png"))
        if any(record.get("split") for total in first for record in total.records):
            pictures.append(time_plot(first, setting, folder / "time.png"))
    if {"W", "N"} & differ and ours:
        first = [total for total in ours if total.method == ours[0].method]
        pictures.append(heat_map(first, setting, folder / "heat_map.png"))
    if {"W", "N", "G"} & differ and ours:
        pictures.append(tokens_plot(ours, setting, folder / "step_tokens.png"))
    return pictures


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    lines = ("".join(f"<td>{html.escape(cell.replace('**', ''))}</td>" for cell in line) for line in body)
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    name = html.escape(path.stem.replace("_", " "))
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"></figure>'


def _settings(found: Sequence[Total]) -> str:
    versions = found[0].records[0]["versions"]
    return json.dumps({"hardware": found[0].hardware, "versions": versions, "settings": common(found)}, indent=2)
