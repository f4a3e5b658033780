"""The soak: a leak is seen, noise is not taken for one, and samples see all processes of a server."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import soak
from scripts.studies.parts.soak import BLOCKS, Sample, descendants, slope, take_sample, verdict
from tests.conftest import ROOT, Processes

MIB = 1 << 20


def samples(leak_mib_an_hour: float = 0.0, threads_an_hour: float = 0.0, noise_mib: float = 2.0) -> list[Sample]:
    """Two hours of a server of 800 MiB, whose memory goes up and down for a minute at a time."""
    rng = random.Random(1)
    level = 0.0
    made = []
    for index in range(1440):
        level = 0.9 * level + rng.gauss(0, noise_mib)
        hours = index * 5 / 3600
        memory = (800 + 60 * min(1.0, hours / 0.2) + leak_mib_an_hour * hours + level) * MIB
        made.append(Sample(index * 5.0, 3, int(memory), 60 + index % 5, int(40 + threads_an_hour * hours), index, 0))
    return made


def test_a_leak_is_seen_and_a_warm_up_is_none() -> None:
    """Pools that fill in the first minutes are no leak; 30 MiB an hour would end a server within days."""
    assert verdict(samples())[0] == "flat"
    found, lines = verdict(samples(leak_mib_an_hour=30.0))
    assert found == "grows" and lines[0].startswith("resident_bytes: grows")
    assert verdict(samples(threads_an_hour=20.0))[0] == "grows"
    assert verdict(samples(noise_mib=8.0))[0] == "undecided"


def test_the_interval_holds_the_slope() -> None:
    """Samples that are alike count as many: an interval of single samples would call noise a leak."""
    fitted = slope(samples(leak_mib_an_hour=30.0), "resident_bytes")
    assert abs(fitted.per_hour - 30 * MIB) < 2 * fitted.margin
    assert 0 < fitted.margin < 20 * MIB


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="take a longer time"):
        slope(samples()[: 2 * BLOCKS], "threads")


def test_too_short_a_run_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It sent its whole load, and ended in a traceback instead of a verdict."""
    monkeypatch.setattr(soak.subprocess, "Popen", None)  # no server is started for it
    samples_file = tmp_path / "soak.jsonl"
    monkeypatch.setattr(sys, "argv", ["soak.py", "--hours", "nan"])
    assert soak.main() == 2 and capsys.readouterr().err == "error: --hours is nan; it must be a number > 0; try 2\n"
    monkeypatch.setattr(sys, "argv", ["soak.py", "--output", str(samples_file), "--hours", "0.03"])
    assert soak.main() == 2 and not samples_file.exists()
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1), said.err
    assert said.err.startswith("error: 16 samples behind the warm-up; 24 are needed: take a longer time")

    def slow(args: object) -> int:
        verdict(samples()[:9])
        return 0

    monkeypatch.setattr(soak, "run", slow)
    monkeypatch.setattr(sys, "argv", ["soak.py"])
    assert soak.main() == 2 and capsys.readouterr().err.startswith("error: 7 samples behind the warm-up")


def test_a_sample_has_all_processes(processes: Processes) -> None:
    """A rank that leaks is the grandchild of what was started."""
    inner = "import sys; x = bytearray(50 << 20); print('up', flush=True); sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    process = processes.start([sys.executable, "-c", outer], stdin=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == "up\n"
    assert len(descendants(process.pid)) == 2
    sample = take_sample(process.pid, 1.0, 0, 0)
    assert sample.processes == 2 and sample.threads >= 2 and sample.handles >= 6
    assert sample.resident_bytes > 50 * MIB
    process.kill()


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path, processes: Processes) -> None:
    """The command ends, with samples of both ranks, answers and no failure; two minutes decide nothing more."""
    output = tmp_path / "soak.jsonl"
    command = [
        sys.executable,
        str(ROOT / "scripts/soak.py"),
        "--hours",
        "0.02",
        "--every",
        "0.5",
        "--output",
        str(output),
    ]
    ran = processes.run([*command, "--most-tokens", "16"], timeout_s=600)
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["failures"] == 0 and figures["answers"] > 0, ran.stdout + ran.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) > 40 and lines[-1]["processes"] >= 3 and lines[-1]["answers"] > 0
