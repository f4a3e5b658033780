"""What a stage of scripts/gpu_check.sh measured: facts, parity by backend and dtype, profiles and benchmarks.

    python scripts/tables.py gpu FOLDER                     # the reports of a stage
    python scripts/tables.py gpu FOLDER --into STAGE.jsonl  # and a line of JSON for every figure

Ends in one line of JSON. A figure past its limit is marked, and is no error; that `attention=auto` did not take flash
attention is one, and so are texts that differ from plain decoding's by more than rounding. docs/guide/gpu.md says what
the figures mean.
"""

from __future__ import annotations

import contextlib
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from launch.bench.terminal import empty_table

from .harness import Command, option

REPORTS = "facts.jsonl, parity.xml, profile-*.json, benchmark-*.json"
FLASH = "flash"  # what attention=auto is to take
TOO_LARGE = "too little memory"  # in the reason of what is skipped, which is no failure
DIFFERING = "texts that differ"
LIMITS = {1: 1.25, 64: 1.45}  # of t(T) over the time that weights take at the copy's speed: what this project aims at


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A line of the table: a measured value, beside the limit that it is to meet.

    Args:
        name: what was measured, as the table says it.
        value: None where nothing was measured.
        limit: the most that the value may be; None where none is set.
        note: how the value came about.
    """

    name: str
    value: float | None
    limit: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """What the table says of the value against its limit: met, missed or not measured; empty without a limit."""
        if self.limit is None:
            return ""
        if self.value is None:
            return "not measured"
        return "met" if self.value <= self.limit else "MISSED"


def parity(report: Path) -> list[Figure]:
    """The worst error of every part and dtype that the tests recorded, over the tolerance."""
    by_part: dict[tuple[str, str], list[dict[str, str]]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        properties = {item.attrib["name"]: item.attrib["value"] for item in case.iter("property")}
        properties |= {tag: "1" for tag in ("failure", "error", "skipped") if case.find(tag) is not None}
        if "part" in properties:
            by_part.setdefault((properties["part"], properties.get("dtype", "")), []).append(properties)
    return [_parity(f"{part} {dtype}".strip(), cases) for (part, dtype), cases in sorted(by_part.items())]


def _parity(name: str, cases: list[dict[str, str]]) -> Figure:
    counts = {
        "tests": len(cases),
        "FAILED": sum("failure" in case for case in cases),
        "refused": sum("skipped" in case for case in cases),
    }
    measured = [case for case in cases if "tolerance" in case]
    return Figure(
        name=name,
        value=max((float(case["error"]) for case in measured), default=None),
        limit=max((float(case["tolerance"]) for case in measured), default=None),
        note=", ".join(f"{count} {what}" for what, count in counts.items() if count),
    )


def fact(line: dict[str, Any]) -> Figure:
    """The figure of one fact, a line that scripts/gpu_facts.py printed."""
    rest = {key: value for key, value in line.items() if key not in ("section", "name", "value", "unit")}
    said = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in rest.items())
    name = f"{line['section']}: {line['name']}" + (f", {line['unit']}" if line["unit"] else "")
    return Figure(name=name, value=line["value"], note=", ".join(said))


def benchmark(summary: dict[str, Any]) -> Iterator[Figure]:
    """Speeds and differing texts, as the benchmark app prints them with output=json."""
    settings = summary["settings"]
    for method in summary["methods"]:
        name = f"{Path(settings['model']).name}, {settings['dtype']}, {method['method']}"
        speedup = f", {method['speedup']:.2f} x plain" if method["speedup"] else ""
        yield Figure(name=f"{name}, tokens/s", value=method["tokens_per_s"], note=f"S = {method['S']:.2f}{speedup}")
        if method["differing"] is not None:
            ties = method["near_ties"]
            note = f"of {method['prompts']}; {ties} more part at near-ties"
            yield Figure(name=f"{name}, {DIFFERING}", value=method["differing"] - ties, limit=0, note=note)


def figures(profile: dict[str, Any]) -> Iterator[Figure]:
    """The figures of one rank's profile, as the profile app prints it with output=json."""
    points = profile["step_times"]
    ceilings = profile["ceilings"]
    limit_s = profile["work"]["weight_bytes"] / ceilings["bytes_per_s"]
    yield Figure(name="copy, GB/s, read and written", value=ceilings["bytes_per_s"] / 1e9)
    yield Figure(name="product, TFLOP/s", value=ceilings["flop_per_s"] / 1e12)
    yield Figure(name="weights / copy speed, ms", value=1e3 * limit_s)
    for point in points:
        size = point["num_tokens"]
        note = f"{1e3 * point['seconds']:.3f} ms, {point['ratio']:.2f} x t({points[0]['num_tokens']})"
        value = point["seconds"] / limit_s
        yield Figure(name=f"t({size}) / (weights / copy speed)", value=value, limit=LIMITS.get(size), note=note)
    step = profile["step"]
    shares = profile["shares"]
    note = f"{step['num_tokens']} tokens, {1e3 * step['seconds']:.3f} ms"
    yield Figure(name="host and exchange / step", value=shares["host"] + shares["exchange"], limit=0.08, note=note)
    for name in ("attention", "LM head", "other layers"):
        yield Figure(name=f"{name} / step", value=shares[name])
    calls = profile["calls"] or {}
    for key, name in (("launches", "launches a step"), ("kernels", "kernels a step"), ("waits", "waits a step")):
        yield Figure(name=name, value=calls.get(key))
    yield Figure(name="first call beyond later ones, s", value=profile["first_call_s"], note="captures among it")
    for name, speed in profile["speeds"].items():
        note = f"S = {speed['compression']:.2f}" if speed["compression"] else ""
        yield Figure(name=f"tokens/s, {name}", value=speed["tokens_per_s"], note=note)


def ranks(profile: dict[str, Any]) -> Iterator[Figure]:
    """The figures of a profile that R ranks ran together."""
    step = profile["step"]
    name = f"R={profile['R']}"
    note = f"{step['num_tokens']} of {step['max_tokens']} tokens of rank 0"
    yield Figure(name=f"{name}: step, ms", value=1e3 * step["seconds"], note=note)
    yield Figure(name=f"{name}: exchange / step", value=profile["shares"]["exchange"])
    yield Figure(name=f"{name}: host / step", value=profile["shares"]["host"])


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of JSON in a file, but for one that was cut off."""
    found = []
    for line in _lines(path):
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").strip().splitlines()


def _of_profile(profile: dict[str, Any]) -> list[Figure]:
    measured = list(figures(profile) if profile["R"] == 1 else ranks(profile))
    if profile["device"] == "cpu":  # the limits are a GPU's
        measured = [replace(figure, limit=None) for figure in measured]
    return [replace(figure, name=f"{profile['model']}, {figure.name}") for figure in measured]


def _print(lines: Sequence[Figure], title: str) -> None:
    table = empty_table(("figure", "value", "at most", "", "note"), ("figure", "", "note"), title=title)
    for line in lines:
        value = "-" if line.value is None else f"{line.value:.4g}"
        limit = "" if line.limit is None else f"{line.limit:.3g}"
        table.add_row(escape(line.name), value, limit, line.verdict, escape(line.note))
    Console(width=200).print(table)


@dataclass(kw_only=True)
class Gpu(Command):
    """Reads the reports of a stage and prints their figures as one table."""

    folder: Path = option(help=f"{REPORTS}; an empty one has a .err that says why")
    into: Path | None = option(None, "a file for a line of JSON a figure, facts as they are")

    def run(self) -> None:
        facts = [each for path in self.folder.glob("facts.jsonl") for each in whole_lines(path)]
        lines = [line for path in self.folder.glob("parity.xml") for line in parity(path)]
        settings: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("*-*.json")):
            kind, name = path.stem.split("-", 1)
            if not _lines(path):
                reason = ["no message", *_lines(path.with_suffix(".err"))][-1]
                outcome = "skipped" if TOO_LARGE in reason else "FAILED"
                lines.append(Figure(name=name, value=None, note=f"{outcome}: {reason}"))
                continue
            report = json.loads(_lines(path)[-1])
            if kind == "benchmark":
                lines += benchmark(report)
                continue
            settings.append({key: value for key, value in report.items() if not isinstance(value, dict | list)})
            lines += _of_profile(report)
        title = f"{settings[0]['device']}, {settings[0]['dtype']}" if settings else self.folder.name
        _print([*map(fact, facts), *lines], title)
        figures = [asdict(line) for line in lines]
        if self.into:
            self.into.write_text("".join(f"{json.dumps(each)}\n" for each in facts + figures), encoding="utf-8")
        print(json.dumps({"profiles": settings, "facts": facts, "figures": figures}))
        faults = dict.fromkeys(
            f"{each['model']}: {each['attention']}" for each in settings if each["attention"] != FLASH
        )
        if faults:
            print(f"FAILED: attention=auto took {', '.join(faults)}", file=sys.stderr)
        differing = [line for line in lines if line.name.endswith(DIFFERING) and line.value]
        for line in differing:
            print(f"FAILED: {line.name}: {line.value:.0f} {line.note}", file=sys.stderr)
        if faults or differing:
            raise SystemExit(1)
