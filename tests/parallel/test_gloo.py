"""Lookahead parallelism over real gloo processes: the tokens, and the collectives that they cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.support.forked import Forked
from tests.support.launches import check_found
from tests.support.workers import calls, cases, setup
from tests.support.workers.calls import CALLS, SETTINGS, error_of

LAUNCHES = [(2, 0, 8), (4, 12, 16)]
if LONG:
    LAUNCHES = [(2, 0, 12), (4, 12, 20), (3, 20, 28), (8, 28, 36), (5, 36, 44), (2, 44, 90)]


@pytest.mark.parametrize(("ranks", "first", "last"), LAUNCHES)
def test_gloo_ranks_give_plain_greedy(forked: Forked, tmp_path: Path, ranks: int, first: int, last: int) -> None:
    """Processes share less than the threads of the lockstep tests do: a collective mixed up shows here alone."""
    forked.start(ranks, cases.main, tmp_path, first, last).check(240)
    assert check_found(tmp_path, ranks, first, last) == ({"gloo"}, {"cpu"})


def test_ranks_in_different_calls_all_learn_of_both(forked: Forked, tmp_path: Path) -> None:
    """Gloo ends the process where two sizes meet in one collective: no rank could say why."""
    launch = forked.start(2, calls.main, tmp_path, env={"TIMEOUT_S": "5"})
    assert set(launch.wait()) <= {0, 1} and (tmp_path / "0.json").exists(), launch.output()
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, found in enumerate(by_rank):
        for name in CALLS:
            assert found[name] == error_of(name), (name, rank)
        for name in SETTINGS:
            assert found[name] == f"the {name} of rank 1 differs from rank 0's; give every rank the same {name}"
        doing = "rank 0 is beginning Broken.generate, rank 1 is making a LookaheadDecoder"
        assert found["left alone"].startswith(f"a rank came too late, or an exchange failed ({doing};"), found
        assert f"so rank {rank} stops" in found["left alone"]


def test_setting_up_has_a_time_out_of_its_own(forked: Forked, tmp_path: Path) -> None:
    """One rank may compile for minutes; a step that waits so long has lost a rank."""
    launch = forked.start(2, setup.main, tmp_path)
    launch.wait(240)
    ended = [(tmp_path / f"{rank}.ended").read_text().split() for rank in range(2)]
    assert ended[0][1] == "lost", launch.output()
    assert all(float(waited_s) >= 2 * setup.TIMEOUT_S - 0.5 for waited_s, _ in ended), "the first left before the last"
