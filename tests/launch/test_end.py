"""The end of an app's process: what the garbage collector looks through."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import Processes

PROGRAM = """
import gc, sys, types
from launch.cli import end_soon

if {version!r}:
    sys.modules["triton"] = types.ModuleType("triton")
    sys.modules["triton"].__version__ = {version!r}
gc.freeze()
later = []  # made behind the imports, which are frozen
end_soon()
print(gc.get_freeze_count() > 1000, any(each is later for each in gc.get_objects()))
"""


@pytest.mark.parametrize(("version", "frozen"), [("", True), ("3.8.1", True), ("3.9.0", False), ("3.10.0+git1", False)])
def test_what_is_collected_at_the_end(processes: Processes, version: str, frozen: bool) -> None:
    """A collection of all imports takes seconds; Triton 3.9 lists what none has collected."""
    done = processes.run([sys.executable, "-c", PROGRAM.format(version=version)])
    assert done.stdout.split() == [str(frozen), str(not frozen)], done.stderr


def test_nothing_is_said_to_leak(processes: Processes) -> None:
    """With Triton 3.9, thirty lines about its objects stood behind the text of every command."""
    done = processes.run([sys.executable, "-m", "lp", "generate", "1 + 1 =", "max_new_tokens=2", "output=text"])
    assert done.returncode == 0 and done.stdout and "leak" not in done.stderr
