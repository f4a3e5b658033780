"""One table of what scripts/gpu_check.sh found: parity by backend and dtype, then the profile's figures and limits.

    python scripts/gpu_table.py parity.xml profile.json

Ends in one line of JSON. A figure past its limit is said, and is no error: the exit code is that of the parity tests.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A row of the table.

    Args:
        what: is measured.
        value: of it; None where nothing was.
        limit: at most so much; None where none is set.
        note: how it came about.
    """

    what: str
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
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        told = {item.attrib["name"]: item.attrib["value"] for item in case.iter("property")}
        told |= {tag: "1" for tag in ("failure", "error", "skipped") if case.find(tag) is not None}
        if "part" in told:
            found.setdefault((told["part"], told.get("dtype", "")), []).append(told)
    return [_parity(f"{part} {dtype}".strip(), cases) for (part, dtype), cases in sorted(found.items())]


def _parity(what: str, cases: list[dict[str, str]]) -> Figure:
    failed, refused = (sum(tag in case for case in cases) for tag in ("failure", "skipped"))
    errors = [float(case["error"]) for case in cases if "tolerance" in case]
    tolerance = max((float(case["tolerance"]) for case in cases if "tolerance" in case), default=None)
    counts = f"{len(cases)} tests" + f", {failed} FAILED" * bool(failed) + f", {refused} refused" * bool(refused)
    return Figure(what=what, value=max(errors, default=None), limit=tolerance, note=counts)


def figures(found: dict[str, Any]) -> Iterator[Figure]:
    """The profile's."""
    points = {point["rows"]: point for point in found["curve"]}
    first, ceilings = found["curve"][0], found["ceilings"]
    floor_ms = 1e3 * found["work"]["weight_bytes"] / ceilings["bytes_per_s"]
    yield Figure(what="copy, GB/s, read and written", value=ceilings["bytes_per_s"] / 1e9)
    yield Figure(what="product, TFLOP/s", value=ceilings["flop_per_s"] / 1e12)
    note = f"weights at the copy's speed: {floor_ms:.3f} ms"
    yield Figure(
        what=f"t({first['rows']}) over reading the weights", value=found["over_weights"], limit=1.25, note=note
    )
    for rows, point in points.items():
        note = f"{1e3 * point['seconds']:.3f} ms, {point['floor']:.2f} x its floor"
        yield Figure(
            what=f"t({rows}) / t({first['rows']})", value=point["ratio"], limit=1.15 if rows == 64 else None, note=note
        )
    step, shares = found["step"], found["shares"]
    note = f"{step['rows']} rows, {1e3 * step['seconds']:.3f} ms"
    yield Figure(what="host and exchange / step", value=shares["host"] + shares["exchange"], limit=0.08, note=note)
    for name in ("attention", "LM head", "other layers"):
        yield Figure(what=f"{name} / step", value=shares[name])
    for name, speed in found["speeds"].items():
        note = f"S = {speed['compression']:.2f}" if speed["compression"] else ""
        yield Figure(what=f"tokens/s, {name}", value=speed["tokens_per_s"], note=note)


def main(report: str, profile: str) -> None:
    """Print the table and the line."""
    found = json.loads(Path(profile).read_text(encoding="utf-8").splitlines()[-1])
    measured = list(figures(found))
    if found["device"] == "cpu":  # the limits are a GPU's
        measured = [replace(figure, limit=None) for figure in measured]
    rows = [*parity(Path(report)), *measured]
    setting = {key: value for key, value in found.items() if not isinstance(value, dict | list)}
    table = Table(box=SIMPLE_HEAD, title_justify="left", title=f"{found['device']}: {found['model']}, {found['dtype']}")
    for column in ("figure", "value", "at most", "", "note"):
        table.add_column(column, justify="right" if column in ("value", "at most") else "left", no_wrap=True)
    for row in rows:
        value, limit = ("-" if number is None else f"{number:.3g}" for number in (row.value, row.limit))
        table.add_row(row.what, value, limit * (row.limit is not None), row.verdict, row.note)
    Console(width=140).print(table)
    print(json.dumps({**setting, "figures": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
