"""Hydra sweeps whose jobs are launches of two gloo ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launch.bench.records import load_records
from launch.bench.totals import totals
from tests.conftest import Processes
from tests.support.apps import save_tiny_model, tiny_settings
from tests.support.launches import ON_CPU


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_settings(save_tiny_model(tmp_path_factory.mktemp("model"), context=1024))


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
