"""What scripts/gpu_check.sh measured: parity by backend and dtype, then the profile's figures and limits.

    python scripts/tables.py gpu parity.xml profile.json

Ends in one line of JSON. A figure past its limit is marked, and is no error: the exit code of the check is that of the
parity tests.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..table import empty_table


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A line of the table.

    Args:
        name: of what is measured.
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
        """Against the limit."""
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


def figures(profile: dict[str, Any]) -> Iterator[Figure]:
    """Those of a profile, as the profile app prints it with output=json."""
    points = profile["step_times"]
    ceilings = profile["ceilings"]
    first = points[0]["num_tokens"]
    floor_ms = 1e3 * profile["work"]["weight_bytes"] / ceilings["bytes_per_s"]
    yield Figure(name="copy, GB/s, read and written", value=ceilings["bytes_per_s"] / 1e9)
    yield Figure(name="product, TFLOP/s", value=ceilings["flop_per_s"] / 1e12)
    note = f"weights at the copy's speed: {floor_ms:.3f} ms"
    yield Figure(name=f"t({first}) over reading the weights", value=profile["over_weights"], limit=1.25, note=note)
    for point in points:
        size = point["num_tokens"]
        note = f"{1e3 * point['seconds']:.3f} ms, {point['floor']:.2f} x its floor"
        limit = 1.15 if size == 64 else None
        yield Figure(name=f"t({size}) / t({first})", value=point["ratio"], limit=limit, note=note)
    step = profile["step"]
    shares = profile["shares"]
    note = f"{step['num_tokens']} tokens, {1e3 * step['seconds']:.3f} ms"
    yield Figure(name="host and exchange / step", value=shares["host"] + shares["exchange"], limit=0.08, note=note)
    for name in ("attention", "LM head", "other layers"):
        yield Figure(name=f"{name} / step", value=shares[name])
    for name, speed in profile["speeds"].items():
        note = f"S = {speed['compression']:.2f}" if speed["compression"] else ""
        yield Figure(name=f"tokens/s, {name}", value=speed["tokens_per_s"], note=note)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parity", type=Path, help="JUnit XML of the tests in tests/gpu")
    parser.add_argument("profile", type=Path, help="what the profile app printed with output=json")


def run(args: argparse.Namespace) -> None:
    profile = json.loads(args.profile.read_text(encoding="utf-8").splitlines()[-1])
    measured = list(figures(profile))
    if profile["device"] == "cpu":  # the limits are a GPU's
        measured = [replace(figure, limit=None) for figure in measured]
    lines = [*parity(args.parity), *measured]
    title = f"{profile['device']}: {profile['model']}, {profile['dtype']}"
    table = empty_table(("figure", "value", "at most", "", "note"), ("figure", "", "note"), title=title)
    for line in lines:
        value = "-" if line.value is None else f"{line.value:.3g}"
        limit = "" if line.limit is None else f"{line.limit:.3g}"
        table.add_row(line.name, value, limit, line.verdict, line.note)
    Console(width=140).print(table)
    setting = {key: value for key, value in profile.items() if not isinstance(value, dict | list)}
    print(json.dumps({**setting, "figures": [asdict(line) for line in lines]}))
