"""The end of the command's process: its exit code, what still runs, and that nothing is looked through after it."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import Processes

PROGRAM = """
import atexit, sys, threading, time
import launch.cli

class Left:
    def __del__(self):
        print("cleaned up", file=sys.stderr)

left = Left()

def main():
    atexit.register(lambda: print("a handler ran"))
    threading.Thread(target=lambda: (time.sleep(0.2), print("a thread ended"))).start()
    print("the work")
    {ending}

launch.cli.main = main
launch.cli.program()
"""
DONE = "the work\na thread ended\na handler ran\n"


@pytest.mark.parametrize(
    ("ending", "code", "said", "cleaned"),
    [
        ("pass", 0, "", False),
        ("raise SystemExit(3)", 3, "", False),
        ("raise SystemExit(None)", 0, "", False),
        ("raise SystemExit('why')", 1, "why", True),
        ("raise KeyError('a bug')", 1, "KeyError: 'a bug'", True),
    ],
)
def test_how_the_process_ends(processes: Processes, ending: str, code: int, said: str, cleaned: bool) -> None:
    """Threads and handlers come to their end; Python's clean-up, of seconds, follows only where it has to say more."""
    done = processes.run([sys.executable, "-c", PROGRAM.format(ending=ending)])
    assert (done.returncode, done.stdout) == (code, DONE)
    assert said in done.stderr and ("cleaned up" in done.stderr) is cleaned
    assert said or not done.stderr
