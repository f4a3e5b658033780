"""Lookahead parallelism over real gloo processes: the tokens, and the collectives that they cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LONG, Processes
from tests.distributed.launches import ON_CPU, check_cases

LAUNCHES = [(2, 0, 12), (4, 12, 20)] + ([(3, 20, 28), (8, 28, 36), (5, 36, 44), (2, 44, 90)] if LONG else [])


@pytest.mark.parametrize(("ranks", "first", "last"), LAUNCHES)
def test_gloo_ranks_give_plain_greedy(processes: Processes, tmp_path: Path, ranks: int, first: int, last: int) -> None:
    """Processes share less than the threads of the lockstep tests do: a collective mixed up shows here alone."""
    backends, devices = check_cases(processes, tmp_path, ranks, first, last, ON_CPU)
    assert (backends, devices) == ({"gloo"}, {"cpu"})
