"""`python -m lp`: which apps it runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import lp
from tests.conftest import Processes


@pytest.mark.parametrize("place", ["launch", "lp/launch"])
def test_the_apps_are_those_of_this_lp(processes: Processes, tmp_path: Path, place: str) -> None:
    """An lp installed from another clone lent its apps to this one's engine."""
    for folder in ("lp", place):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    shutil.copy(Path(lp.__file__).parent / "__main__.py", tmp_path / "lp")
    (tmp_path / place / "cli.py").write_text("def main(): print(__name__)", encoding="utf-8")
    done = processes.run([sys.executable, "-m", "lp"], cwd=tmp_path)
    assert done.stdout == f"{place.replace('/', '.')}.cli\n", done.stderr
