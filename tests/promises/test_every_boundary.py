"""A rank that is killed, stopped or late between any two steps of a short text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lp
from lp.engine.journal import Journal
from tests.conftest import LONG
from tests.support.forked import Forked, Launch
from tests.support.tiny_models import tiny_model
from tests.support.workers import boundaries
from tests.support.workers.boundaries import CONFIG, EVERY, IDS, NEW, SAMPLING

RANKS = 2
AT_ONCE = 6  # launches, which wait for most of their time


@pytest.fixture(scope="module")
def undisturbed() -> lp.GenerationOutput:
    """The text, and how many steps it takes."""
    return lp.LookaheadDecoder(tiny_model(), CONFIG).generate(IDS, NEW, SAMPLING)


def _started(
    forked: Forked, folder: Path, what: str, places: list[tuple[int, int]]
) -> Iterator[tuple[int, int, Launch]]:
    """A launch for every victim and step, a few at once."""
    for first in range(0, len(places), AT_ONCE):
        launches = []
        for victim, at in places[first : first + AT_ONCE]:
            own = folder / f"{victim}-{at}"
            own.mkdir()
            launches.append((victim, at, forked.start(RANKS, boundaries.main, own, what, victim, at)))
        yield from launches


@pytest.mark.parametrize("what", ["killed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_a_rank_lost_behind_any_step(
    what: str, forked: Forked, tmp_path: Path, undisturbed: lp.GenerationOutput
) -> None:
    """The other one names it and ends, and the text goes on from the journal as if nothing had been."""
    assert undisturbed.steps > 4
    plain = lp.AutoregressiveDecoder(tiny_model()).generate(IDS, NEW, SAMPLING).tokens
    steps = range(undisturbed.steps)
    places = list(itertools.product(range(RANKS), steps)) if LONG else [(0, 0), (1, steps[-2])]
    for victim, at, launch in _started(forked, tmp_path, what, places):
        other = launch.processes[1 - victim]
        other.join(60)
        assert other.exitcode not in (None, 0), launch.output()
        said = re.findall(r"RankLost: (.+) does not answer, so (.+) stops", launch.output())
        assert said == [(f"rank {victim}", f"rank {1 - victim}")], launch.output()
        launch.processes[victim].kill()  # one that is stopped has the journal until then
        launch.processes[victim].join(60)
        decoder = lp.LookaheadDecoder(tiny_model(), CONFIG)
        again = Journal(tmp_path / f"{victim}-{at}" / "journal.jsonl", lp.ParallelContext.single("cpu"))
        output = again.generate(decoder, IDS, NEW, SAMPLING)
        assert output.tokens == plain and output.resumed > 0


def test_a_rank_late_behind_every_step(forked: Forked, tmp_path: Path, undisturbed: lp.GenerationOutput) -> None:
    """Within the limit that is no fault, and no other text."""
    for victim, _, launch in _started(forked, tmp_path, "late", [(rank, EVERY) for rank in range(RANKS)]):
        launch.check()
        for rank in range(RANKS):
            assert json.loads((tmp_path / f"{victim}-{EVERY}" / f"{rank}.json").read_text()) == undisturbed.tokens
