"""The arithmetic of replicas under traffic."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.bench.ceilings import Work
from launch.bench.projection import Link
from scripts.studies import main
from scripts.studies.parts.gpu_projection import LogLaw
from scripts.studies.splits import Shape
from scripts.studies.traffic import Fleet, Serving, Traffic, cells
from tests.conftest import ROOT
from tests.scripts.test_splits import RUNS, machine

WORK = Work(weight_bytes=13 * 10**9, kv_token_bytes=500_000, token_flop=13 * 10**9, head_flop=0, key_flop=500_000)
LINK = Link(base_us=5, hop_us=1, gb_s=300, source="made up")


def fleet(memory_gb: float = 141) -> Fleet:
    shape = Shape(work=WORK, layers=32, hidden=4096)
    law = LogLaw(start=1.2, doubling=0.3)
    return Fleet(machine=machine(memory_gb), link=LINK, shape=shape, law=law, gpus=8)


def fastest(ways: list[Serving]) -> Serving:
    return max(ways, key=lambda way: way.text_tokens_per_s)


def test_servers_keep_up() -> None:
    """As few texts at a time as bring the tokens that are asked for: one fewer would fall behind."""
    for requests in (1, 8, 30):
        traffic = Traffic(requests, 1000, 250)
        for way in fleet().ways(traffic):
            assert way.servers * way.lp * way.tp == 8
            demand = requests / way.servers * traffic.new_tokens
            assert way.texts * way.text_tokens_per_s >= demand
            if way.texts > 1:
                budgets = (1, 8, 16, 32, 64, 128)
                fewer = [
                    fleet().step(way.servers, way.lp, way.tp, way.texts - 1, budget, way.decoding, traffic)
                    for budget in budgets
                ]
                assert all((way.texts - 1) * each.text_tokens_per_s < demand for each in fewer)


def test_more_traffic_takes_smaller_servers() -> None:
    """One server of all GPUs reads all prompts itself: what is fastest for a few requests cannot keep up with many."""
    few, many = ([*fleet().ways(Traffic(requests, 1000, 250))] for requests in (0.5, 40))
    assert fastest(few).servers == 1 < fastest(many).servers
    assert fastest(few).text_tokens_per_s > fastest(many).text_tokens_per_s
    assert {way.servers for way in many} < {way.servers for way in few}
    assert [*fleet().ways(Traffic(10_000, 1000, 250))] == []
    assert cells(Traffic(10_000, 1000, 250), [])[1] == "none keeps up"
    assert cells(Traffic(40, 1000, 250), many)[-2:] == ["cannot", "cannot"]


def test_memory_counts_cached_tokens() -> None:
    """Weights that just fit leave no room for texts."""
    roomy, tight = ([*fleet(memory).ways(Traffic(40, 1000, 250))] for memory in (141, 14.9))
    assert min(way.tp for way in roomy) == 1 and min((way.tp for way in tight), default=8) > 1


def test_the_table_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the one that the study prints."""
    main(["traffic", str(RUNS)])
    said = capsys.readouterr().out
    page = (ROOT / "docs/guide/growing.md").read_text(encoding="utf-8")
    part = page.split("<!-- traffic -->\n")[1].split("<!-- end of traffic -->")[0]
    assert part in said
    assert len(re.findall(r"^\| [\d.]+ \| \d x ", part, re.M)) >= 8


def test_sessions_over_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A session that keeps its replica reads its past once; a text is the same wherever its turns go."""
    results = tmp_path / "results.jsonl"
    small = ["--limit", "1", "--replicas", "1,2", "--temperatures", "0.8", "--max-new-tokens", "6", "--num-tokens", "8"]
    main(["session_routing", "--results", str(results), "--cache-tokens", "2048", *small])
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(each["replicas"], each["routed"]) for each in found] == [(1, "session"), (2, "session"), (2, "turn")]
    alone, by_session, by_turn = found
    assert alone["texts"] == by_session["texts"] == by_turn["texts"]
    assert alone["reused"] == by_session["reused"] > by_turn["reused"] > 0
    assert "| 2 | turn |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["session_routing", "--limit", "2", "--replicas", "1,2"])
    assert "2 sessions for 2 replicas" in capsys.readouterr().err
