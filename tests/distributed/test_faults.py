"""What goes wrong on one rank of a real launch: every rank learns of it, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import LONG, Processes
from tests.distributed.launches import ON_CPU, check_kill, pid_of
from tests.distributed.workers.faults import IDS, STEP
from tests.tiny_models import plain_greedy, tiny_model

WORKER = "tests.distributed.workers.faults"
RANKS = 4 if LONG else 2


def test_one_rank_stops_them_all(processes: Processes, tmp_path: Path) -> None:
    """A rank that leaves the loop alone leaves the others waiting in a collective until its time limit."""
    process = processes.start(
        processes.torchrun(RANKS, WORKER, str(tmp_path), "drift", "callback", "signal", "signal", "callback"), ON_CPU
    )
    signals = [(2, RANKS - 1, signal.SIGINT), (3, 0, signal.SIGTERM)]
    for generation, rank, number in signals:
        for other in range(RANKS):  # all have begun
            pid_of(tmp_path, generation, other, process)
        os.kill(pid_of(tmp_path, generation, rank, process), number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    drift, callback, *others = zip(
        *(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)), strict=True
    )
    last = RANKS - 1
    rest = ", ".join(str(rank) for rank in range(last))
    for end in drift:
        assert f"RuntimeError: rank {last} differs from rank {rest} at step {STEP + 1}:" in end["reason"]
    assert len({tuple(end["streamed"]) for end in drift}) == 1
    for rank, end in enumerate(callback):
        assert end["reason"] == ("ZeroDivisionError: from the callback" if rank == last else "interrupted")
    plain = plain_greedy(tiny_model(), IDS, 200)
    for generation in (callback, *others):
        (streamed,) = {tuple(end["streamed"]) for end in generation}
        assert list(streamed[:200]) == plain[: len(streamed)]
        assert all(end.get("tokens", list(streamed)) == list(streamed) for end in generation)
        assert len({end["steps"] for end in generation if "steps" in end}) == 1
    for generation in others[:2]:
        assert {end["reason"] for end in generation} == {"interrupted"}
    left = [name for rank in range(RANKS) for name in (tmp_path / f"{rank}.threads").read_text().split()]
    assert not [name for name in left if "gloo" in name], "a thread of the group may abort the process as it ends"
    assert processes.wait_for_end(10) == []


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_killed_rank_ends_the_launch(processes: Processes, tmp_path: Path, victim: int) -> None:
    """SIGKILL leaves no time to say goodbye: the others must find out, say so, and keep what was printed."""
    check_kill(processes, tmp_path, RANKS, victim, ON_CPU)
