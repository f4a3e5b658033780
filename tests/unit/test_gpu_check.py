"""scripts/gpu_check.sh: its dry run on a CPU, and what its table says of failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from launch.bench.tables.gpu import Figure, parity
from tests.conftest import Processes

COMMAND = ["bash", "scripts/gpu_check.sh"]
ENV = {"PYTHON": sys.executable, "LP_WHEELS": ""}


def test_the_dry_run_goes_all_the_way(processes: Processes, tmp_path: Path) -> None:
    """On the day a GPU is there, the command must not fail for a reason that any machine could have shown."""
    ran = processes.run([*COMMAND, "--dry-run", "--out", str(tmp_path)], ENV, timeout_s=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["model"], found["device"], found["W"], found["G"]) == ("codellama_7b", "cpu", 4, 12)
    values = {figure["name"]: figure["value"] for figure in found["figures"]}
    expected = {"attention sdpa float32", "attention eager bfloat16", "t(1) over reading the weights", "t(16) / t(1)"}
    expected |= {"host and exchange / step", "tokens/s, transformers generate", "tokens/s, lookahead"}
    expected |= {"attention flash float32", "step, capture=off, flash float32"}
    assert expected <= values.keys() and None not in {values[name] for name in expected}
    assert {path.name for path in tmp_path.iterdir()} >= {"parity.xml", "profile.json", "figures.txt"}


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--fast"], "unknown argument --fast"), (["--wheels", "none"], "could not install the wheels in none")],
)
def test_a_wrong_call_is_one_line(processes: Processes, args: list[str], message: str) -> None:
    """Said at once, not after minutes on a machine that costs money."""
    ran = processes.run([*COMMAND, "--dry-run", *args], ENV)
    assert ran.returncode == 2 and message in ran.stderr.splitlines()[-1]


def test_without_a_gpu_it_says_so(processes: Processes) -> None:
    """Skipped tests and a profile of the CPU would look like a check that passed."""
    ran = processes.run(COMMAND, {**ENV, "CUDA_VISIBLE_DEVICES": ""})
    assert ran.returncode == 2 and "torch sees no GPU; --dry-run runs on a CPU" in ran.stderr


def test_the_table_counts_what_failed(tmp_path: Path) -> None:
    """The worst error is that of a failed test, and a backend that refused every case has none."""

    def case(dtype: str, error: float | None, child: str = "") -> str:
        recorded = {"part": "attention flash", "dtype": dtype}
        recorded |= {} if error is None else {"error": str(error), "tolerance": "0.1"}
        properties = "".join(f'<property name="{name}" value="{value}"/>' for name, value in recorded.items())
        return f"<testcase><properties>{properties}</properties>{child}</testcase>"

    cases = [case("bf16", 0.05), case("bf16", 0.2, "<failure/>"), case("float64", None, "<skipped/>"), "<testcase/>"]
    report = tmp_path / "parity.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    half, double = parity(report)
    assert half == Figure(name="attention flash bf16", value=0.2, limit=0.1, note="2 tests, 1 FAILED")
    assert half.verdict == "MISSED"
    assert double == Figure(name="attention flash float64", value=None, note="1 tests, 1 refused")
