"""Draw a folder of results as plots and one HTML file, which opens without a network.

A sweep of lp benchmark ends with it; `python -m launch.bench.report FOLDER` draws any results again.
"""

from __future__ import annotations

import argparse
import base64
import csv
import html
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from lp.commands import module_command
from lp.errors import UserError

from ..config.builders import ORACLE, PLAIN
from .plots import accepted_plot, dataset_plot, heat_map, scaling_plots, time_plot, tokens_plot
from .records import load_records
from .scaling_lines import Line, scaling_table
from .table_text import caption, common, notes, ordered, spread, table_of, varying
from .totals import Total, totals

STYLE = """:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --best: #e8f1fb }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --page: #181818; --line: #444; --best: #1d3550 } }
body { font: 15px/1.4 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
body { color: var(--text); background: var(--page) }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto }
td, th { padding: .2em .7em; border-bottom: 1px solid var(--line); text-align: left }
td { font-variant-numeric: tabular-nums } tr.best { background: var(--best) }
figure { display: inline-block; margin: 1em 1em 1em 0; width: 26em; max-width: 100% } figcaption { font-size: 12px }
img { width: 100%; background: #fff } pre { white-space: pre-wrap; font-size: 12px } code { font-size: 12px }"""


def write_report(folder: Path) -> list[Path]:
    """Draw the plots that a folder's results allow, and write report.html with plots, tables and settings.

    Args:
        folder: folder that lp benchmark or lp scaling wrote results to; results in subfolders count too.

    Returns:
        The files that were written, report.html last.

    Raises:
        ValueError: the folder holds no results.
    """
    lines = read_lines(folder / "scaling.csv")
    found = ordered(totals(load_records(folder))) if any(folder.rglob("*.jsonl")) or not lines else []
    if found:
        setting = "; ".join([caption(found), *notes(found)])
    else:
        setting = (folder / "scaling.md").read_text(encoding="utf-8").split("\n\n")[1].strip()
    drawn_by = f"{module_command('bench.report')} {shlex.quote(str(folder))}"
    parts = [f"<h1>{html.escape(folder.resolve().name)}</h1><p>{html.escape(setting)}</p>"]
    pictures: list[Path] = []
    if found:
        best = _best(found)
        parts += [_best_line(best)] if best else []
        parts.append(_table(*table_of(found), best=found.index(best) if best else None))
        pictures += _plots(found, setting, folder)
    if lines:
        parts.append(_table(*scaling_table(lines)))
        pictures += scaling_plots(lines, setting, folder)
    parts += [_picture(path, drawn_by) for path in pictures]
    if found:
        parts.append(_origins(found))
        parts.append(f"<h2>Settings</h2><pre>{html.escape(_settings(found))}</pre>")
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>lp</title><style>{STYLE}</style>'
    report = folder / "report.html"
    report.write_text(page + "\n".join(parts) + "</html>\n", encoding="utf-8")
    return [*pictures, report]


def read_lines(path: Path) -> list[Line]:
    """Read the lines of a scaling table from a scaling.csv; an empty list if there is no such file.

    Args:
        path: the file.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [_line(record) for record in csv.DictReader(file)]


def _line(record: dict[str, str]) -> Line:
    types = dict.fromkeys(("method", "kind", "link"), str) | dict.fromkeys(("ranks", "tp", "W", "G", "launch"), int)
    values = {name: types.get(name, float)(text) if text else None for name, text in record.items()}
    return Line(**values)  # type: ignore[arg-type]


def _plots(found: Sequence[Total], setting: str, folder: Path) -> list[Path]:
    """Plots by task for results of one setting; over W, N and step tokens for results that differ in these."""
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


def _best(found: Sequence[Total]) -> Total | None:
    """The totals with the highest speed-up over plain decoding; None where plain decoding did not run."""
    compared = [total for total in found if total.speedup is not None and total.method not in (PLAIN, ORACLE)]
    return max(compared, key=lambda total: total.speedup or 0.0, default=None)


def _best_line(best: Total) -> str:
    """A sentence about the fastest method, with the range of its rounds."""
    rounds = spread(best.speedups)
    said = "one round, no known spread" if rounds == "-" else f"{rounds} in its rounds"
    text = f"{best.method}, {best.speedup:.2f}x plain decoding ({said}), S = {best.compression:.2f}"
    return f"<p>Best: <b>{html.escape(text)}</b>; its line is marked.</p>"


def _table(heads: Sequence[str], body: Sequence[Sequence[str]], best: int | None = None) -> str:
    """A table in HTML; the line with index `best` is marked."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    parts = [f"<tr>{head}</tr>"]
    for number, line in enumerate(body):
        cells = "".join(f"<td>{html.escape(cell.replace('**', ''))}</td>" for cell in line)
        parts.append(f'<tr class="best">{cells}</tr>' if number == best else f"<tr>{cells}</tr>")
    return "<table>" + "".join(parts) + "</table>"


def _picture(path: Path, command: str) -> str:
    """A plot inside the page, with its name and the command that draws it."""
    data = base64.b64encode(path.read_bytes()).decode()
    name = html.escape(path.stem.replace("_", " "))
    caption = f"<figcaption>{name}: <code>{html.escape(command)}</code></figcaption>"
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}">{caption}</figure>'


def _origins(found: Sequence[Total]) -> str:
    """A table of the commands that measured: each with its commit and the days of its first and last record."""
    days: dict[tuple[str, str], list[str]] = {}
    for total in found:
        for record in total.records:
            origin = record.get("origin") or {}
            key = (origin.get("command") or "not recorded", origin.get("commit") or "not recorded")
            days.setdefault(key, []).append((record.get("time") or "not recorded").partition("T")[0])
    body = [[*key, " to ".join(dict.fromkeys([min(dates), max(dates)]))] for key, dates in days.items()]
    return "<h2>Measured by</h2>" + _table(("command", "commit", "date"), body)


def _settings(found: Sequence[Total]) -> str:
    versions = found[0].records[0]["versions"]
    return json.dumps({"hardware": found[0].hardware, "versions": versions, "settings": common(found)}, indent=2)


def main(args: Sequence[str] | None = None) -> None:
    """Draw a folder's plots and report, and print the paths: `python -m launch.bench.report FOLDER`.

    Args:
        args: the command line's arguments; None takes sys.argv.
    """
    parser = argparse.ArgumentParser(prog=module_command("bench.report"), description=__doc__)
    parser.add_argument("folder", type=Path, help="what the benchmark or the scaling app wrote to; subfolders count")
    try:
        for path in write_report(parser.parse_args(args).folder):
            print(path)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
