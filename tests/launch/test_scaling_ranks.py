"""`lp scaling` over launches of one and two gloo ranks, and over two nodes."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from launch.bench.records import load_records
from launch.bench.report import read_lines
from tests.conftest import Processes
from tests.support.apps import save_tiny_model, tiny_settings
from tests.support.launches import ON_CPU


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_settings(save_tiny_model(tmp_path_factory.mktemp("model"), context=1024))


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
