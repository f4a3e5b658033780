"""The arithmetic of splits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.bench.ceilings import Work
from scripts.studies import main
from scripts.studies.parts.arithmetic import GPUS
from scripts.studies.parts.gpu_projection import LogLaw
from scripts.studies.splits import Machine, Shape, Sum, cells
from tests.conftest import ROOT

RUNS = ROOT / "docs" / "experiments" / "results" / "scaling-projection" / "runs.jsonl"
WORK = Work(
    weight_bytes=13_000_000_000, kv_token_bytes=500_000, token_flop=13_000_000_000, head_flop=0, key_flop=500_000
)
RING = Sum(base_s=7e-6, hop_s=1e-6, bytes_per_s=1e11, ring=True)


def machine(memory_gb: float = 141) -> Machine:
    return Machine(gpu=GPUS["h200"], memory_bytes=1e9 * memory_gb, sums=RING, host_s=(1e-3, 0.0))


def test_a_sum_takes_steps_of_a_ring_or_one() -> None:
    """With one rank there is nothing to sum."""
    one_step = Sum(base_s=5e-6, hop_s=0.0, bytes_per_s=1e11, ring=False)
    assert RING.seconds(1, 1e6) == one_step.seconds(1, 1e6) == 0
    assert RING.seconds(4, 1e6) == pytest.approx(7e-6 + 6 * (1e-6 + 2.5e-6))
    assert one_step.seconds(4, 1e6) == pytest.approx(5e-6 + 3e-5)


def test_splits_are_those_that_have_room_with_their_best_tokens() -> None:
    """A part that does not fit must not win."""
    shape = Shape(work=WORK, layers=32, hidden=4096)
    law = LogLaw(start=1.2, doubling=0.3)
    splits = [*machine().splits(shape, law, 8, 1024)]
    assert [(split.lp, split.tp) for split in splits] == [(8, 1), (4, 2), (2, 4), (1, 8)]
    for split in splits:
        for budget in (split.budget // 2, split.budget * 2):
            other = machine().step(shape, split.lp, split.tp, budget, 1024)
            assert law.compression(split.lp * budget) / sum(other.values()) < split.tokens_per_s
    assert splits[0].parts["sums"] == 0 < splits[1].parts["sums"] < splits[3].parts["sums"]
    assert splits[0].parts["weights"] == pytest.approx(8 * splits[3].parts["weights"], rel=0.1)
    small = [*machine(memory_gb=4).splits(shape, law, 8, 1024)]
    assert [split.tp for split in small] == [4, 8]
    row = cells("model", "ring", "measured", small)
    assert row[-2] == "no room" and row[-1].endswith(" x")


def test_the_table_takes_s_and_host_time_from_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Host times of the B that several ranks were measured with; without runs it says how to make them."""
    main(["splits", str(RUNS), "--shapes", "llama2_7b"])
    said = capsys.readouterr().out
    runs = [json.loads(line) for line in RUNS.read_text().splitlines()]
    alone = next(
        run["host_s"]
        for run in runs
        if "host_s" in run
        and (run["ranks"], run["budget"], run["temperature"]) == (1, 64, 0.8)
        and run["method"] != "paper"
    )
    (host_ms,) = {float(found) for found in re.findall(r"\| ([\d.]+) ms \+", said)}
    assert host_ms == pytest.approx(1e3 * alone, rel=0.25), "near the line"
    assert len(re.findall(r"^\| llama2_7b \|", said, re.M)) == 4
    with pytest.raises(SystemExit, match="2"):
        main(["splits", str(tmp_path / "none.jsonl")])
    assert "has no runs at T = 0.8 of 1 and more ranks" in capsys.readouterr().err
