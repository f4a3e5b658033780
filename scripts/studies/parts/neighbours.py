"""Pieces of other files that are most like the lines before a cursor, as an editor sends them with a request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launch.serve.fim import Extra

from .held_out import SourceText

LINES = 30  # of a piece
BEFORE = 20  # lines before the cursor that a piece is compared with
NAME = re.compile(r"[^\W\d]\w+")


def neighbours(before: str, others: Sequence[SourceText], count: int) -> list[Extra]:
    """The pieces with the largest share of names in common with the last lines, the best one last.

    Args:
        before: the text of the file before the cursor.
        others: files that pieces are taken from, each cut into pieces of LINES lines.
        count: how many; of one file at most one.
    """
    wanted = set(NAME.findall("\n".join(before.splitlines()[-BEFORE:])))
    best = []
    for other in others:
        lines = other.text.splitlines()
        pieces = ["\n".join(lines[start : start + LINES]) for start in range(0, len(lines), LINES)]
        best.append(max((_likeness(wanted, set(NAME.findall(piece))), other.path, piece) for piece in pieces or [""]))
    return [Extra(path, piece) for _, path, piece in sorted(best)[-count:]]


def _likeness(some: set[str], others: set[str]) -> float:
    """Jaccard's index of two sets of names."""
    return len(some & others) / max(len(some | others), 1)
