"""What a GPU is asked to do, counted by kind and by the line of lp/ that asked."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import lp

SYNC = "sync"  # the host waits for the device
LAUNCH = "launch"  # something is put into the device's queue: a kernel, a copy, the replay of a graph, a collective
PAGEABLE = "pageable"  # a copy to the device from memory that is not pinned: the driver copies it twice
KINDS = (SYNC, LAUNCH, PAGEABLE)
_ROOT = Path(lp.__file__).resolve().parent
_names: dict[str, str | None] = {}  # of files, those in lp/ from there


class Events(Counter[tuple[str, str, str]]):
    """How often, by (kind, what, file:line); a difference of two is what happened between them."""

    def note(self, kind: str, what: str) -> None:
        """Count one, at the line of lp/ that runs now."""
        self[kind, what, line_of_lp()] += 1

    def total(self, kind: str = "") -> int:
        """How many of one kind."""
        return sum(count for (its_kind, _, _), count in self.items() if kind in ("", its_kind))

    def table(self, per: float = 1) -> str:
        """One line for every kind and place, the most frequent first, each count divided by `per`."""
        rows = sorted(self.items(), key=lambda item: (KINDS.index(item[0][0]), -item[1], item[0]))
        return "\n".join(f"{kind:9}{count / per:8.2f}  {what:28} {line}" for (kind, what, line), count in rows)


def line_of_lp() -> str:
    """The innermost line of lp/ that runs now, as "lp/engine/generation.py:123"; "?" outside of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path not in _names:
            _names[path] = _name_in_lp(Path(path))
        if name := _names[path]:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _name_in_lp(path: Path) -> str | None:
    return path.relative_to(_ROOT.parent).as_posix() if path.is_relative_to(_ROOT) else None
