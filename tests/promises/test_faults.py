"""What goes wrong on one rank of a real launch: every rank learns of it, and none is left behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

import lp
from lp.parallel.lost_ranks import ROLL_CALL_S
from tests.conftest import LONG, Processes
from tests.support.forked import Forked
from tests.support.launches import ON_CPU, check_kill, pid_of
from tests.support.tiny_models import plain_greedy, tiny_model
from tests.support.workers import faults
from tests.support.workers.faults import IDS, STEP
from tests.support.workers.restart import NEW, SAMPLINGS

RANKS = 4 if LONG else 2


def test_one_rank_stops_them_all(forked: Forked, tmp_path: Path) -> None:
    """A rank that leaves the loop alone leaves the others waiting in a collective until its time limit."""
    launch = forked.start(RANKS, faults.main, tmp_path, ["drift", "callback", "signal", "signal", "callback"])
    signals = [(2, RANKS - 1, signal.SIGINT), (3, 0, signal.SIGTERM)]
    for generation, rank, number in signals:
        for other in range(RANKS):  # all have begun
            pid_of(tmp_path, generation, other, launch.goes_on)
        os.kill(pid_of(tmp_path, generation, rank, launch.goes_on), number)
    launch.check()
    drift, callback, *others = zip(
        *(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)), strict=True
    )
    last = RANKS - 1
    rest = ", ".join(str(rank) for rank in range(last))
    for end in drift:
        assert f"RuntimeError: rank {last} differs from rank {rest} at step {STEP + 1}:" in end["reason"]
    assert len({tuple(end["streamed"]) for end in drift}) == 1
    for rank, end in enumerate(callback):
        assert end["reason"] == ("ZeroDivisionError: from the callback" if rank == last else "raised 0")
    plain = plain_greedy(tiny_model(), IDS, 200)
    for generation in (callback, *others):
        (streamed,) = {tuple(end["streamed"]) for end in generation}
        assert list(streamed[:200]) == plain[: len(streamed)]
        assert all(end.get("tokens", list(streamed)) == list(streamed) for end in generation)
        assert len({end["steps"] for end in generation if "steps" in end}) == 1
    for generation, (_, rank, number) in zip(others, signals, strict=False):
        got = [number if each == rank else 0 for each in range(RANKS)]
        assert [end["reason"] for end in generation] == [f"raised {each}" for each in got]
    left = [name for rank in range(RANKS) for name in (tmp_path / f"{rank}.threads").read_text().split()]
    assert not [name for name in left if "gloo" in name], "a thread of the group may abort the process as it ends"


@pytest.mark.slow  # of an app's rank 1: test_torchrun
@pytest.mark.parametrize("victim", range(RANKS))
def test_a_killed_rank_ends_the_launch(processes: Processes, tmp_path: Path, victim: int) -> None:
    """SIGKILL leaves no time to say goodbye: the others must find out, say so, and keep what was printed."""
    check_kill(processes, tmp_path, RANKS, victim, ON_CPU)


@pytest.mark.parametrize("victim", range(RANKS) if LONG else [1])
def test_a_frozen_rank_is_named(forked: Forked, tmp_path: Path, victim: int) -> None:
    """SIGSTOP leaves no closed connection: only the time limit tells, and somebody must say who it was.

    The last rank also comes late, which is no fault while it comes within the limit.
    """
    late_s, timeout_s = (20, 40) if LONG else (2, 6)  # of which loading on a busy machine takes some
    env = {"TIMEOUT_S": str(timeout_s), "LATE_S": str(late_s)}
    launch = forked.start(RANKS, faults.main, tmp_path, ["endless"], env=env)
    pids = [pid_of(tmp_path, 0, rank, launch.goes_on) for rank in range(RANKS)]
    time.sleep(random.Random(f"freeze-{victim}").random())  # at any place of any step
    os.kill(pids[victim], signal.SIGSTOP)
    frozen = time.monotonic()

    def named_by(ranks: int) -> float:
        """After how many seconds so many ranks have named it."""
        while len(set(re.findall(r"so (rank \d+) stops", launch.output()))) < ranks:
            assert time.monotonic() - frozen < 2 * timeout_s + 60, launch.output()
            time.sleep(0.05)
        return time.monotonic() - frozen

    assert timeout_s - 1 < named_by(1) < timeout_s + 3 * ROLL_CALL_S
    named_by(RANKS - 1)  # one that still calls the roll would hear from it
    os.kill(pids[victim], signal.SIGCONT)
    assert 0 not in launch.wait(60)
    said = {
        stops: lost for lost, stops in re.findall(r"RankLost: (.+) does not answer, so (.+) stops", launch.output())
    }
    said.pop(f"rank {victim}", None)  # that goes on, and misses the others
    assert said == {f"rank {rank}": f"rank {victim}" for rank in range(RANKS) if rank != victim}
    assert f"step {STEP}" in launch.output().splitlines()


@pytest.mark.slow  # test_journal restarts in one process
def test_a_restarted_launch_says_what_an_undisturbed_one_says(processes: Processes, tmp_path: Path) -> None:
    """A rank is killed at a drawn step: nothing of a greedy or a sampled text is lost or said twice.

    torchrun keeps its store, with the addresses of the ranks before: ranks that are started again must not meet there.
    """
    rng = random.Random(7)
    deaths = [f"{rng.randrange(RANKS)}:{rng.randint(45, 55)}"]  # in the second text, the first being done
    if LONG:
        deaths.insert(0, f"{rng.randrange(RANKS)}:{rng.randint(4, 20)}")
    command = processes.torchrun(RANKS, "tests.support.workers.restart", str(tmp_path), *deaths)
    ran = processes.run(command, ON_CPU | {"MAX_RESTARTS": str(len(deaths))}, timeout_s=240)
    assert ran.returncode == 0, ran.stderr
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert [said["start"] for said in by_rank] == [len(deaths)] * RANKS, "nobody was killed"
    oracle = lp.AutoregressiveDecoder(tiny_model())
    for number, sampling in enumerate(SAMPLINGS):
        seeded = sampling and lp.SamplingParams(temperature=sampling.temperature, seed=by_rank[0]["seed"])
        plain = oracle.generate(IDS, NEW, seeded).tokens
        for said in by_rank:
            assert said["outputs"][number]["tokens"] == plain
            assert 0 < said["outputs"][number]["resumed"] <= NEW
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["end"] for line in lines if "end" in line] == ["length", "length"]
    assert processes.wait_for_end() == []
