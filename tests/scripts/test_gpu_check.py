"""scripts/gpu_check.sh: its stages, their dry run on a CPU, and what its table says of failures."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import lp
from launch.bench.gpu_calls import GpuCalls, calls_per_step, count, ran_on
from launch.bench.origin import versions
from scripts.gpu_facts import SECTIONS, Place, finishes
from scripts.studies.gpu import Figure, Gpu, parity
from tests.conftest import Processes

COMMAND = ["bash", "scripts/gpu_check.sh"]
ENV = {"PYTHON": sys.executable, "LP_WHEELS": ""}


TINY = Place(device=torch.device("cpu"), dtype=torch.float32, scale=32, rounds=1, repeats=1)
STAGES = ("facts", "half", "profile", "bench", "several", "large")
# Stands for Python: notes what it is asked to run, and does only what the script reads the answer of.
NOTING = """#!/bin/sh
printf '%s ' "$@" >>"$NOTES"; echo >>"$NOTES"
case "$*" in
  *into*) echo '{"name": "a figure"}' >"$5" ;;
  *"$FAILS"*) exit 1 ;;
  *is_available* | *find_spec* | *device_count*) exec "$REAL" "$@" ;;
esac
"""


def _profiles_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text().splitlines()[-1]) for path in folder.glob("profile-*.json")]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_the_dry_run_of_a_stage_goes_all_the_way(processes: Processes, tmp_path: Path, stage: str) -> None:
    """On the day a GPU is there, the command must not fail for a reason that any machine could have shown."""
    ran = processes.run([*COMMAND, stage, "--dry-run", "--out", str(tmp_path)], ENV, timeout_s=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *lines, end = map(json.loads, (tmp_path / f"{stage}.jsonl").read_text().splitlines())
    assert end["stage"] == stage and end["failed"] == 0
    assert not [line for line in lines if "failed" in line or "refused" in line]
    values = {line["name"]: line["value"] for line in lines}
    half = {"attention sdpa bfloat16", "attention eager bfloat16", "step, capture=off, flash bfloat16"}
    own = {"t(1) / (weights / copy speed)", "t(16) / (weights / copy speed)", "weights / copy speed, ms"}
    own |= {"host and exchange / step", "first call beyond later ones, s", "tokens/s, plain", "tokens/s, lookahead"}
    own |= {"tokens/s, transformers generate"}
    texts = Path(os.environ.get("LP_REAL_MODEL") or "demo").name  # the model of the stages whose texts count
    expected = {
        "facts": {"copy, 1 GiB", "qkv, 64 rows", "qkv, 1 rows and 64", "norm", "7b, T=1, L=32, as chosen", "t(64)"},
        "half": half,
        "profile": {f"codellama_7b, {name}" for name in own} | {f"{texts}, float32, hf_generate, texts that differ"},
        "bench": {f"{texts}, float32, {name}, tokens/s" for name in ("lookahead_auto", "plain", "prompt_lookup")},
        "several": {"codellama_7b, R=2: step, ms", "codellama_7b, R=2: exchange / step"},
        "large": {name.replace("bfloat16", "float32") for name in half},
    }[stage]
    assert expected <= values.keys() and None not in {values[name] for name in expected}
    settings = [(one["device"], one["attention"], one["R"], one["G"]) for one in _profiles_of(tmp_path / stage)]
    assert settings == [("cpu", "flash", {"profile": 1, "several": 2}[stage], 12) for _ in settings]
    with tarfile.open(tmp_path / "results.tar.gz") as results:
        assert {f"./{stage}.jsonl", f"./{stage}/figures.txt"} <= set(results.getnames())


def test_a_stage_that_is_done_is_not_measured_again(processes: Processes, tmp_path: Path) -> None:
    """A run that is cut off goes on where it was; what failed before still counts."""
    noting, notes, out = tmp_path / "python", tmp_path / "notes", tmp_path / "out"
    noting.write_text(NOTING)
    noting.chmod(0o755)
    env = {**ENV, "PYTHON": str(noting), "REAL": sys.executable, "NOTES": str(notes), "FAILS": "tests/gpu"}

    def asked(*args: str) -> tuple[int, list[str]]:
        notes.write_text("")
        code = processes.run([*COMMAND, *args, "--dry-run", "--out", str(out)], env).returncode
        return code, [line for line in notes.read_text().splitlines() if line.startswith(("-m", "scripts/gpu_facts"))]

    assert asked("facts", "bench")[0] == 0
    code, commands = asked()
    assert code == 1, "the tests failed"
    assert len(commands) == 5 and {command.split()[1] for command in commands} == {
        "pytest", "launch.profile", "launch.benchmark", "torch.distributed.run",
    }  # fmt: skip
    assert asked() == (1, [])
    (out / "several.jsonl").write_text('{"name": "a figure, and then the machine went"}\n')
    assert asked("several")[0] == 0 and len(asked("several", "facts", "--again")[1]) == 2
    ends = [json.loads((out / f"{stage}.jsonl").read_text().splitlines()[-1])["failed"] for stage in STAGES]
    assert ends == [0, 1, 0, 0, 0, 1] and (out / "results.tar.gz").exists()


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "attention"])
def test_facts_of_a_cpu(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The tree kernel is interpreted in the dry run alone: Triton has to be told before it is imported."""
    SECTIONS[section](TINY)
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert facts and all({"section", "name", "value", "unit"} <= fact.keys() for fact in facts)
    assert {fact["section"] for fact in facts} == {section}


def _fails(place: Place) -> None:
    raise RuntimeError("no such kernel\nand more")


@pytest.mark.parametrize(
    ("section", "reason"), [(_fails, "RuntimeError: no such kernel"), (lambda place: os._exit(7), "ended with 7")]
)
def test_a_section_that_fails_is_a_fact(
    section: Callable[[Place], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A kernel that breaks the device's context would end all that comes behind it, and nobody would know of what."""
    monkeypatch.setattr("scripts.gpu_facts.SECTIONS", {"broken": section})
    assert not finishes("broken", TINY)
    (fact,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert fact["section"] == "broken" and reason in fact["failed"] and "more" not in fact["failed"]


def _table(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    Gpu(folder=folder, into=folder / "figures.jsonl").run()
    figures: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert [json.loads(line) for line in (folder / "figures.jsonl").read_text().splitlines()] == figures
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
    (tmp_path / "profile-13b.json").touch()
    (tmp_path / "profile-13b.err").write_text("Traceback\nRuntimeError: no kernel\n")
    by_name = {figure["name"]: figure for figure in _table(tmp_path, capsys)}
    assert by_name["13b"]["note"] == "FAILED: RuntimeError: no kernel"
    assert by_name["34b"]["note"] == "skipped: error: too little memory on cuda: 64 GiB needed"
    first, large = (by_name[f"7b, t({size}) / (weights / copy speed)"] for size in (1, 64))
    assert (first["value"], first["limit"], large["value"]) == (pytest.approx(1.0), 1.25, pytest.approx(2.0))
    assert by_name["7b, launches a step"]["value"] == 2 and by_name["7b, kernels a step"]["value"] == 900


@pytest.mark.parametrize("profiles", [[_profile(attention="sdpa")], [_profile(), _profile(attention="sdpa")]])
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
    assert "attention=auto took 7b: sdpa" in capsys.readouterr().err


@pytest.mark.parametrize(("near_ties", "fails"), [(2, False), (1, True)])
def test_texts_that_differ_fail_unless_they_tie(
    near_ties: int, fails: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exactness is the promise; rounding may part two texts, and nothing else."""
    method = {"method": "lookahead_auto", "prompts": 8, "tokens_per_s": 9.0, "S": 2.0, "speedup": 1.5}
    method |= {"differing": 2, "near_ties": near_ties}
    report = {"settings": {"model": "/models/real", "dtype": "float32"}, "methods": [method]}
    (tmp_path / "benchmark-exact.json").write_text(json.dumps(report))
    if fails:
        with pytest.raises(SystemExit):
            _table(tmp_path, capsys)
        assert "FAILED: real, float32, lookahead_auto, texts that differ: 1 of 8" in capsys.readouterr().err
        return
    speed, differing = _table(tmp_path, capsys)
    assert speed["note"] == "S = 2.00, 1.50 x plain" and differing["note"] == "of 8; 2 more part at near-ties"


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


def test_where_an_event_ran() -> None:
    """Compared by identity, no event is of any device: an H200 was said to run 0 kernels a step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(2).exp()
    found = [(ran_on(event, DeviceType.CPU), ran_on(event, DeviceType.CUDA)) for event in profiler.events()]
    assert found and set(found) == {(True, False)}


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

    monkeypatch.setattr("launch.bench.origin.version", uninstalled)
    assert versions() | {"lp": lp.__version__, "torch": "1.0"} == versions()
