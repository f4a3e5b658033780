"""A sweep on a real Ray of this machine, killed and started again. `pip install '.[sweeps-ray]'`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.bench.records import load_records
from launch.bench.totals import totals
from tests.conftest import ROOT
from tests.support.eventually import eventually

pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="the extra `sweeps-ray` is not installed")

JOBS = 8
SWEEP = ("W=2,3,4,5", "N=2,3", "limit=1", "max_new_tokens=8", "methods=[lookahead]")
TAKES = "hydra.launcher.ray.remote"
ON_A_CPU = ("parallel.nproc=null", f"{TAKES}.num_cpus=1", f"{TAKES}.num_gpus=0")
LOCAL = ("+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.init.include_dashboard=false")
# Ray's own processes need a minute to start where others keep the cores busy, and its workers give way to all others.
SLOW_MACHINE = {"RAY_agent_register_timeout_ms": "120000", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.slow
def test_a_sweep_is_killed_and_goes_on(tmp_path: Path) -> None:
    """Records of jobs that had ended are kept as they are, and all are in one folder, with one table."""
    records, log = tmp_path / "records", tmp_path / "log"
    command = [sys.executable, "-m", "launch.benchmark", "-m", "experiment=ray", *ON_A_CPU, *LOCAL, *SWEEP]
    command += [f"out={records}", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    environment = os.environ | SLOW_MACHINE | {"PYTHONPATH": str(ROOT)}

    def sweep() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT)

    first = sweep()
    try:
        assert eventually(lambda: len([*records.glob("*.jsonl")]) >= 2 or first.poll() is not None, 480)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    before = {path: path.read_bytes() for path in records.glob("*.jsonl")}
    assert 2 <= len(before) < JOBS, log.read_text()
    again = sweep()
    assert again.wait(900) == 0, log.read_text()
    assert all(path.read_bytes().startswith(kept) for path, kept in before.items())
    settings = [(total.setting["W"], total.setting["N"]) for total in totals(load_records(records))]
    assert sorted(settings) == [(width, size) for width in (2, 3, 4, 5) for size in (2, 3)]
    assert all(len(path.read_text().splitlines()) == 1 for path in records.glob("*.jsonl")), "a prompt measured twice"
    assert "report.html" in {path.name for path in records.iterdir()}
