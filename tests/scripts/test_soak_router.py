"""What scripts/soak_router.py allows a kill to cost; and a short run of it, where a router is installed."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="the package httpx is not installed")

from scripts.soak_router import BROKEN, MALFORMED, Down, Record
from scripts.studies.parts.routers import program
from tests.conftest import Processes


@pytest.mark.parametrize(
    ("status", "start", "allowed"),
    [
        (BROKEN, -1, True),  # seconds from the kill: it was under way
        (BROKEN, 1, False),
        (503, -1, True),
        (503, 1, True),  # the router did not know yet
        (503, 9, False),  # it was told
        (400, -1, False),
        (MALFORMED, -1, False),
        (429, 1, False),
    ],
)
def test_what_a_kill_may_cost(status: int, start: float, allowed: bool) -> None:
    now = time.monotonic()
    killed = now - 10
    record = Record(io.StringIO(), downs=[Down(killed, until=killed + 5)])
    record.failed(killed + start, status, "message")
    assert record.counts["failed otherwise"] == (not allowed)
    assert json.loads(record.file.getvalue())["allowed"] == allowed  # type: ignore[attr-defined]


def test_nothing_may_fail_before_a_kill() -> None:
    record = Record(io.StringIO(), downs=[Down(time.monotonic() + 60)])
    record.failed(time.monotonic() - 1, BROKEN, "message")
    assert record.counts["failed otherwise"] == 1


@pytest.mark.slow
def test_a_short_run(processes: Processes, tmp_path: Path) -> None:
    if not program("smg"):
        pytest.skip("smg is not installed; pip install smg, and LP_ROUTERS=its folder bin")
    command = ["scripts/soak_router.py", "--hours", "0.03", "--kill-every", "30", "--output", str(tmp_path / "out")]
    done = processes.run([sys.executable, *command], timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["kills"] >= 2 and figures["answers"] > 20 and figures["wrong texts"] == 0
