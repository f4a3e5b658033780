"""`bash torchrun.sh` as a user types it: output, exit codes and signals, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

import lp
from launch.data.prompts import load_builtin
from tests.conftest import LONG, ROOT, Processes
from tests.support.apps import save_tiny_model
from tests.support.tiny_models import plain_greedy

APP = "launch.generate"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)


@pytest.fixture(scope="module")
def settings(folder: Path) -> list[str]:
    return ["model=hf", f"model.name={folder}", "model.dtype=float64", "W=5", "N=3", "G=4", "limit=1"]


def _run_dir(tmp_path: Path) -> dict[str, str]:
    return {"LP_RUN_DIR": str(tmp_path / "run")}


def test_two_ranks_say_what_one_process_says(
    processes: Processes, folder: Path, settings: list[str], tmp_path: Path
) -> None:
    """Rank 0 alone prints, once, also what eight ranks would refuse eight times; a process group left after the first
    job could not be joined again; ranks but the first leave no files.
    """
    before = set(ROOT.iterdir())
    asked = ["-m", *settings, "task=builtin", "max_new_tokens=24,0,5", "output=json", "compare=true"]
    ran = processes.run(processes.torchrun(2, APP, *asked), _run_dir(tmp_path))
    assert ran.returncode == 2
    assert ran.stderr.count("max_new_tokens is 0") == 1 and "Traceback" not in ran.stderr, ran.stderr
    model, tokenizer = lp.load(folder, "float64")
    ids = tokenizer(load_builtin(1)[0].text)["input_ids"]
    said = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [each["max_new_tokens"] for each in said] == [24, 5]
    for each in said:
        assert json.dumps(each).count('"equal": true') >= 2
        (prompt,) = each["prompts"]
        assert prompt["text"] == tokenizer.decode(plain_greedy(model, ids, each["max_new_tokens"]))
    assert set(ROOT.iterdir()) == before
    assert processes.wait_for_end() == []


def _in_a_text(processes: Processes, settings: list[str], folder: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A launch on two ranks that has begun to print a long text, and its rank 1."""
    asked = [*settings, "max_new_tokens=1500", "compare=false"]
    process = processes.start(processes.torchrun(2, APP, *asked), _run_dir(folder))
    assert process.stdout is not None
    while "===" not in process.stdout.readline():
        assert process.poll() is None, "it ended before its first text"
    time.sleep(0.5)
    return process, next(p for p in processes.alive() if p.environ().get("RANK") == "1" and "launch.cli" in p.cmdline())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM] if LONG else [signal.SIGTERM])
def test_signals_reach_the_ranks(
    processes: Processes, settings: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    """What was generated is shown, with its figures, and nothing keeps running."""
    process, _ = _in_a_text(processes, settings, tmp_path)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "interrupted" in out and "tokens" in out
    assert processes.wait_for_end(20) == []


@pytest.mark.slow  # test_launch_generate marks texts that are cut off; signals end a launch above
def test_what_was_printed_is_kept_and_marked_partial(processes: Processes, settings: list[str], tmp_path: Path) -> None:
    """A text cut off by a lost rank must not look like a finished one."""
    process, rank_1 = _in_a_text(processes, settings, tmp_path)
    rank_1.kill()
    out, err = process.communicate(timeout=30)
    assert process.returncode != 0 and "1: -9" in err, err
    assert "[partial: the run failed here]" in out
    assert processes.wait_for_end() == []


@pytest.mark.slow  # signals end a launch above
def test_sigterm_to_one_worker_ends_the_run_in_order(processes: Processes, settings: list[str], tmp_path: Path) -> None:
    """A node that is taken away says so to its rank: the step is finished, all is shown, and nobody has failed."""
    process, rank_1 = _in_a_text(processes, settings, tmp_path)
    rank_1.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "interrupted" in out and "[partial" not in out and "Traceback" not in err
    assert processes.wait_for_end() == []
