"""Which drawn cases have run: a file of JSON lines, one for a few cases, so that a run goes on where it was stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.drawn_cases import pairs

SETTINGS = ("commit", "seed", "share", "archs")
COUNTS = ("cases", "several ranks", "sampled", "failures")


class Ledger:
    """The file of cases that have run, from which a later run learns what is left.

    Args:
        path: JSONL file, made where it is missing; None: results are kept in memory alone.

    Attributes:
        lines: objects of the file so far. A line that was cut off is dropped, and what is added begins a new line.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        text = path.read_text(encoding="utf-8") if path and path.exists() else ""
        whole, _, cut = text.rpartition("\n")
        self._begins = "\n" if cut else ""
        self.lines: list[dict[str, Any]] = []
        for line in whole.splitlines():
            try:
                self.lines.append(json.loads(line))
            except json.JSONDecodeError:  # which was cut off when a run was killed
                continue

    def missing(self, settings: dict[str, Any], first: int, last: int, chunk: int) -> Iterator[tuple[int, int]]:
        """(first number, count) of cases below `last` that have not run under these settings, a chunk at a time."""
        done = {
            number
            for line in self.lines
            if _settings(line) == _settings(settings)
            for number in range(line["first"], line["first"] + line.get("cases", 0))
        }
        while first < last:
            if first in done:
                first += 1
                continue
            end = first + 1
            while end < min(last, first + chunk) and end not in done:
                end += 1
            yield first, end - first
            first = end

    def add(self, line: dict[str, Any]) -> None:
        """Append a line to the file and to `lines`."""
        self.lines.append(line)
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{self._begins}{json.dumps(line)}\n")
            self._begins = ""


def _settings(line: dict[str, Any]) -> list[Any]:
    return [line.get(name) for name in SETTINGS]


def met_pairs(lines: Sequence[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """How many cases had both features, by pair: which combinations a run has tested, and which not yet."""
    met = Counter[tuple[str, str]]()
    for line in lines:
        bits = line.get("features", {})
        for one, other in pairs():
            met[one, other] += (bits.get(one, 0) & bits.get(other, 0)).bit_count()
    return met


def report(lines: Sequence[dict[str, Any]]) -> str:
    """A table of cases by commit and seed, and the pairs of features that no case had."""
    sums: dict[tuple[Any, ...], Counter[str]] = {}
    for line in lines:
        key = tuple(map(str, _settings(line)[:3]))
        sums.setdefault(key, Counter()).update({name: line.get(name, 0) for name in (*COUNTS, "seconds")})
    rows = ["| commit | seed | share | cases | with several ranks | sampled | mismatches | s |", "|" + "---|" * 8]
    rows += [
        f"| {' | '.join(key)} | {' | '.join(f'{count[name]:,}' for name in COUNTS)} | {count['seconds']:,.0f} |"
        for key, count in sums.items()
    ]
    met = met_pairs(lines)
    never = [f"{one} + {other}" for one, other in pairs() if not met[one, other]]
    rows.append(f"pairs of features: {len(pairs()) - len(never)} of {len(pairs())} met")
    return "\n".join([*rows, *(f"  not met: {pair}" for pair in never)])
