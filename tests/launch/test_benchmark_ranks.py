"""Sweeps and scaling whose jobs are launches of two gloo ranks."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from launch.bench.records import load_records
from launch.bench.report import read_lines
from launch.bench.totals import totals
from tests.conftest import Processes
from tests.support.apps import save_tiny_model
from tests.support.forked import Forked
from tests.support.launches import ON_CPU
from tests.support.workers import app


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), context=1024)
    return ["model=hf", f"model.name={folder}", "model.dtype=float64", "N=3", "G=4", "limit=2", "max_new_tokens=12"]


@pytest.mark.slow  # test_launch_benchmark sweeps; the scaling below launches two ranks
def test_a_sweep_of_launches(processes: Processes, settings: list[str], tmp_path: Path) -> None:
    """Rows of two ranks, a failed job named at the end, one table of the others, and plots."""
    asked = ["-m", *settings, "W=2", "parallel.nproc=2,0", f"out={tmp_path}"]
    asked += ["methods=[lookahead,lookahead@1,plain,transformers_tp]"]
    env = ON_CPU | {"LP_RUN_DIR": str(tmp_path)}
    ran = processes.run([sys.executable, "-m", "launch.cli", "benchmark", *asked], env, timeout_s=240)
    assert ran.returncode == 2 and "job 2 failed with exit code 2" in ran.stderr, ran.stderr
    found = totals(load_records(tmp_path))
    assert [total.method for total in found] == ["lookahead", "lookahead@1", "plain", "transformers_tp"]
    assert all(total.differing == 0 and total.setting["ranks"] == 2 for total in found)
    ours, alone, plain, _ = found
    assert ours.compression == alone.compression > plain.compression == 1
    assert [len(total.records[0]["split"]) for total in found] == [2, 1, 1, 2]
    assert {"by_task.png", "report.html"} <= {path.name for path in tmp_path.iterdir()} and "vs plain" in ran.stdout
    assert processes.wait_for_end() == []


@pytest.mark.slow  # test_launch_benchmark: what fails on rank 0 alone fails on all; test_torchrun: a sweep goes on
def test_a_job_that_fails_on_rank_0_leaves_the_next_one(
    processes: Processes, settings: list[str], tmp_path: Path
) -> None:
    """Rank 0 alone makes the draft model: the others must not wait for it with other methods."""
    asked = ["-m", *settings, "W=2", "methods=[hf_assisted],[lookahead,plain]", "limit=1", f"out={tmp_path}"]
    asked = [each for each in asked if each != "limit=2"]
    ran = processes.run(processes.torchrun(2, "launch.benchmark", *asked), ON_CPU, timeout_s=240)
    assert ran.returncode == 2 and ran.stderr.count("job 1 failed with exit code 2") == 1, ran
    assert ran.stderr.count("1 failed;") == 1, "every rank has the list"
    assert [(t.method, t.setting["ranks"], t.differing) for t in totals(load_records(tmp_path))] == [
        ("lookahead", 2, 0), ("plain", 2, 0)
    ]  # fmt: skip
    assert processes.wait_for_end(5) == []


def test_methods_of_ranks_that_divide_a_model_are_compared(forked: Forked, settings: list[str], tmp_path: Path) -> None:
    """Rank 0 compared alone, by a model of which it has a part: the job ended by its time-out."""
    asked = [*settings, "W=2", "parallel.tp=2", "methods=[lookahead,plain]", "parallel.timeout_s=30", f"out={tmp_path}"]
    launch = forked.start(2, app.main, tmp_path, "benchmark", *asked, env={"LP_RUN_DIR": str(tmp_path / "run")})
    launch.check(240)
    assert [(each.method, each.differing) for each in totals(load_records(tmp_path))] == [
        ("lookahead", 0),
        ("plain", 0),
    ]


def test_scaling_measures_ranks_and_holds_a_projection_against_them(
    processes: Processes, settings: list[str], tmp_path: Path
) -> None:
    """The launches that it makes, and the error that it publishes."""
    asked = [*settings, "W=4", "ranks=[2]", "project=true", "projected_ranks=[2]", "weak=false", f"out={tmp_path}"]
    ran = processes.run([sys.executable, "-m", "launch.scaling", *asked], ON_CPU, timeout_s=240)
    assert ran.returncode == 0, ran.stderr
    lines = [(line.method, line.ranks, line.kind) for line in read_lines(tmp_path / "scaling.csv")]
    assert lines.count(("lookahead", 2, "projected")) == 4
    on_two = ("lookahead", "lookahead_auto")
    measured = {("plain", 1, "measured"), *((method, 2, "measured") for method in on_two)}
    assert measured == {line for line in lines if line[2] == "measured"}
    assert "lookahead on 2 ranks: projected" in (tmp_path / "scaling.md").read_text()
    assert processes.wait_for_end() == []


@pytest.mark.slow  # test_nodes has the nodes' order; the scaling above is of one node
def test_scaling_over_two_nodes(processes: Processes, settings: list[str], tmp_path: Path) -> None:
    """Two launchers of this machine: node 0 alone measures one rank and writes, both run two ranks between them."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    asked = [*settings, "W=4", "ranks=[1,2]", "methods=[lookahead]", "parallel.backend=gloo"]
    command = [sys.executable, "-m", "launch.scaling", *asked]
    started = []
    for node in range(2):
        shared = {"NNODES": "2", "NPROC": "1", "NODE_RANK": str(node), "RDZV_ENDPOINT": f"127.0.0.1:{port}"}
        own = {"LP_RUN_DIR": str(tmp_path / f"node-{node}"), "OMP_NUM_THREADS": "1"}
        started.append(processes.start(command, ON_CPU | shared | own))
    (said, errors), (said_1, errors_1) = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0], errors + errors_1
    lines = read_lines(tmp_path / "node-0" / "scaling.csv")
    assert [(line.method, line.ranks, line.kind) for line in lines] == [
        ("lookahead", 1, "measured"), ("lookahead", 2, "measured")
    ]  # fmt: skip
    (record, *_) = load_records(tmp_path / "node-0" / "ranks-2")
    assert len(record["split"]) == 2 and "written to" in said
    assert said_1 == "" and not [path for path in (tmp_path / "node-1").rglob("*") if path.is_file()]
    assert processes.wait_for_end() == []
