"""The fuzzer's ledger: a run that was killed goes on, and what was not met is said."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lp.models.recurrent_layers import TRANSFORMERS_KEEPS_STATES
from scripts import fuzz
from tests.support.drawn_cases import drawn, features, pairs
from tests.support.fuzz_ledger import Ledger, met_pairs, report

SETTINGS: dict[str, Any] = {"commit": "abc", "seed": 1, "share": 0.1}


def numbers(ledger: Ledger, last: int) -> list[int]:
    return [first + at for first, count in ledger.missing(SETTINGS, 0, last, 20) for at in range(count)]


def test_every_case_runs_once_whatever_was_killed(tmp_path: Path) -> None:
    """A run of days would begin anew, skip what was cut off, or count a case twice."""
    path = tmp_path / "ledger.jsonl"
    for first, count in ((0, 20), (60, 20), (40, 7)):
        Ledger(path).add(SETTINGS | {"first": first, "cases": count})
    Ledger(path).add(SETTINGS | {"commit": "other", "first": 20, "cases": 20})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"commit": "abc", "seed": 1, "fir')
    ledger = Ledger(path)
    assert numbers(ledger, 100) == [*range(20, 40), *range(47, 60), *range(80, 100)]
    for first, count in ledger.missing(SETTINGS, 0, 100, 20):
        ledger.add(SETTINGS | {"first": first, "cases": count})
    assert numbers(Ledger(path), 100) == []
    assert sum(line["cases"] for line in Ledger(path).lines if line["commit"] == "abc") == 100


def test_several_processes_leave_no_chunk_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is taken and not run is missing from every run, and the counts say less than was asked for."""
    monkeypatch.setattr(fuzz, "ProcessPoolExecutor", lambda processes, *_, **__: ThreadPoolExecutor(processes))
    draws = fuzz.Draws(seed=0, share=0.1, archs=None, until=None)
    for chunks in (3, 9):
        lines = fuzz.run_all(draws, ((first, 0) for first in range(chunks)), processes=2)
        assert sorted(line["first"] for line in lines) == [*range(chunks)]


def test_pairs_that_no_case_had_are_named(tmp_path: Path) -> None:
    """A pair that is never drawn is one that nobody has tested, and a table of counts would not show it."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.add(SETTINGS | {"first": 0, "cases": 2, "features": {"tp": 0b11, "eos": 0b10, "turns": 0b01}})
    met = met_pairs([json.loads((tmp_path / "ledger.jsonl").read_text())])
    assert (met["tp", "eos"], met["tp", "turns"], met["eos", "turns"]) == (1, 1, 0)
    said = report(ledger.lines)
    assert "not met: eos + turns" in said and "not met: tp + eos" not in said
    assert f"2 of {len(pairs())} met" in said


@pytest.mark.skipif(
    not TRANSFORMERS_KEEPS_STATES, reason="models with recurrent layers need transformers 5.21 or newer"
)
def test_all_pairs_are_drawn() -> None:
    """A feature that `drawn` no longer gives, or a pair that it takes apart again, would be tested by luck alone."""
    cases = [drawn(0, number, 0.25) for number in range(3600)]
    had = [{*features(case)} for case in cases]
    never = [pair for pair in pairs() if not any({*pair} <= each for each in had)]
    assert not never
    unlike = {tuple(sorted((one, other))) for each in had for one in each for other in each if one < other}
    assert unlike <= {tuple(sorted(pair)) for pair in pairs()}, "said never to go together"
    assert {name for each in had for name in each} == {name for pair in pairs() for name in pair}
