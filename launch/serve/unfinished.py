"""Requests that have not ended, as files that outlive the process: a server that is started again reports them."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from time import time
from typing import Any

from lp.checks import env_int
from lp.errors import UserError


class UnfinishedRequests:
    """A folder with a file for each request, from when it is taken until it has ended or its client has left.

    Prompts and texts are not written.

    Args:
        folder: of this server alone; None keeps nothing.

    Attributes:
        earlier: requests of the server that had the folder before, oldest first.

    Raises:
        ValueError: the folder can't be made or read.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._next = 0
        self.earlier: list[dict[str, Any]] = []
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
            self.earlier = [_read(path) for path in paths]
            for path in paths:
                path.unlink()
        except (OSError, ValueError) as error:
            raise UserError(
                f"{folder} can't keep unfinished requests ({error}); set LP_RUN_DIR to another folder"
            ) from None

    def begin(self, name: str, **facts: Any) -> Path | None:
        """Note a request that is taken; what `end` takes.

        Args:
            name: that its client knows, too.
            facts: more to report.
        """
        if self._folder is None:
            return None
        path = self._folder / f"{self._next}.json"
        self._next += 1
        with contextlib.suppress(OSError):  # a full disk must not cost the text
            path.write_text(json.dumps({"id": name, "began": int(time()), **facts}))
        return path

    def end(self, noted: Path | None) -> None:
        """It has ended."""
        if noted is not None:
            with contextlib.suppress(OSError):
                noted.unlink()


def unfinished_folder() -> Path | None:
    """In the run's folder, which torchrun.sh chose, where torchrun may start the ranks again."""
    run = os.environ.get("LP_RUN_DIR")
    return Path(run) / "unfinished" if run and env_int("TORCHELASTIC_MAX_RESTARTS", 0) else None


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {"id": "unknown"}  # the machine, or its disk, ended in the middle of the writing
