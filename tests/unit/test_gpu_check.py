"""scripts/gpu_check.sh: its dry run on a CPU, and what its table says of failures."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import lp
from launch.bench.gpu_calls import GpuCalls, calls_per_step, count
from launch.bench.session import versions
from launch.bench.tables.gpu import Figure, parity, run
from tests.conftest import Processes

COMMAND = ["bash", "scripts/gpu_check.sh"]
ENV = {"PYTHON": sys.executable, "LP_WHEELS": ""}


@pytest.mark.slow
def test_the_dry_run_goes_all_the_way(processes: Processes, tmp_path: Path) -> None:
    """On the day a GPU is there, the command must not fail for a reason that any machine could have shown."""
    ran = processes.run([*COMMAND, "--dry-run", "--out", str(tmp_path)], ENV, timeout_s=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    settings = [(one["model"], one["device"], one["attention"], one["R"], one["G"]) for one in found["profiles"]]
    assert settings == [("codellama_7b", "cpu", "flash", ranks, 12) for ranks in (2, 1)]
    values = {figure["name"]: figure["value"] for figure in found["figures"]}
    own = {"t(1) / (weights / copy speed)", "t(16) / (weights / copy speed)", "weights / copy speed, ms"}
    own |= {"host and exchange / step", "first call beyond later ones, s", "tokens/s, plain", "tokens/s, lookahead"}
    own |= {"tokens/s, transformers generate", "R=2: step, ms", "R=2: exchange / step"}
    expected = {f"codellama_7b, {name}" for name in own}
    expected |= {"attention sdpa float32", "attention eager bfloat16", "attention flash float32"}
    expected |= {"step, capture=off, flash float32"}
    assert expected <= values.keys() and None not in {values[name] for name in expected}
    assert values["codellama_7b, launches a step"] is None, "a CPU has none to count"
    names = {"parity.xml", "profile-codellama_7b.json", "profile-codellama_7b-on-2.json", "figures.txt"}
    assert {path.name for path in tmp_path.iterdir()} >= names


def _table(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    run(argparse.Namespace(folder=folder))
    figures: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    return figures


def _profile(**fields: Any) -> str:
    """What the profile app printed of a GPU that copies 2 TB/s, and a model of 14 GB."""
    points = [{"num_tokens": size, "seconds": took, "ratio": took / 0.007} for size, took in ((1, 0.007), (64, 0.014))]
    found: dict[str, Any] = {"model": "7b", "device": "cuda:0", "dtype": "bfloat16", "attention": "flash", "R": 1}
    found |= {"ceilings": {"bytes_per_s": 2e12, "flop_per_s": 5e14}, "work": {"weight_bytes": 14e9}}
    found |= {"step_times": points, "step": {"num_tokens": 40, "max_tokens": 60, "seconds": 0.01}, "speeds": {}}
    found |= {"shares": dict.fromkeys(("host", "exchange", "attention", "LM head", "other layers"), 0.03)}
    found |= {"calls": {"launches": 2.0, "kernels": 900.0, "waits": 1.0}, "first_call_s": 3.0}
    return json.dumps(found | fields)


def test_a_model_without_room_is_skipped_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Left out in silence, it would look as if nobody had asked; limits are of the time that the weights take."""
    (tmp_path / "parity.xml").write_text("<testsuites/>")
    (tmp_path / "profile-7b.json").write_text(_profile())
    (tmp_path / "profile-34b.json").touch()
    (tmp_path / "profile-34b.err").write_text("warning\nerror: too little memory on cuda: 64 GiB needed\n")
    by_name = {figure["name"]: figure for figure in _table(tmp_path, capsys)}
    assert by_name["34b"]["note"] == "skipped: error: too little memory on cuda: 64 GiB needed"
    first, large = (by_name[f"7b, t({size}) / (weights / copy speed)"] for size in (1, 64))
    assert (first["value"], first["limit"], large["value"]) == (pytest.approx(1.0), 1.25, pytest.approx(2.0))
    assert by_name["7b, launches a step"]["value"] == 2 and by_name["7b, kernels a step"]["value"] == 900


@pytest.mark.parametrize("profiles", [[_profile(attention="sdpa")], [_profile(), _profile(attention="sdpa")], []])
def test_another_attention_than_flash_fails(
    profiles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every figure would be of another kernel, and only a line of a long table would say so."""
    (tmp_path / "parity.xml").write_text("<testsuites/>")
    for number, text in enumerate(profiles):
        (tmp_path / f"profile-{number}.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        _table(tmp_path, capsys)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "attention=auto took 7b: sdpa" in said if profiles else "nothing was profiled" in said


def test_what_a_step_asks_is_counted_by_kind() -> None:
    """A replayed graph is one launch of many kernels; torch's own operators are neither."""
    events = [("cudaGraphLaunch", False), ("gemm", True), ("gemm", True), ("Memcpy HtoD (Pinned -> Device)", True)]
    events += [("cuLaunchKernelEx", False), ("cudaStreamSynchronize", False), ("aten::cudaLaunchKernel", False)]
    assert count(events) == GpuCalls(launches=2, kernels=2, waits=1)


def test_counts_are_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill launches hundreds of kernels, which would be shared out among the steps of a short text."""

    def profiled(decode: Any, tokens: int) -> tuple[GpuCalls, int]:
        steps = decode(tokens)
        return GpuCalls(launches=500 + 3 * steps, kernels=900 + 70 * steps, waits=5 + steps), steps

    monkeypatch.setattr("launch.bench.gpu_calls._profiled", profiled)
    assert calls_per_step(lambda tokens: (tokens + 1) // 2, 12) == GpuCalls(launches=3, kernels=70, waits=1)  # type: ignore[arg-type, return-value]
    assert calls_per_step(lambda tokens: 1, 12) is None  # type: ignore[arg-type, return-value]


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


def test_records_of_a_clone_have_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is lent, nothing is installed: the clone runs as it stands."""

    def uninstalled(name: str) -> str:
        if name.startswith("lp"):
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("launch.bench.session.version", uninstalled)
    assert versions() | {"lp": lp.__version__, "torch": "1.0"} == versions()
