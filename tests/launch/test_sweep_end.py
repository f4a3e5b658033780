"""What a sweep says and ends with when its table or its figures can't be shown."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from hydra._internal.callbacks import Callbacks
from omegaconf import OmegaConf

from launch.bench.terminal import console_on
from launch.running.errors import INTERRUPTED, LOST, READER_LEFT, USER_ERROR, reported
from launch.sweep import SweepEnd

FAILURES: dict[str, tuple[BaseException, int, str]] = {
    "folder of somebody else": (PermissionError(errno.EACCES, "Permission denied", "a.png"), USER_ERROR, "as out="),
    "a folder there": (IsADirectoryError(errno.EISDIR, "Is a directory", "a.png"), USER_ERROR, "as out="),
    "read-only": (OSError(errno.EROFS, "Read-only file system", "a.png"), USER_ERROR, "write elsewhere"),
    "bug": (RuntimeError("a bug"), LOST, "Traceback"),
    "Ctrl-C": (KeyboardInterrupt(), INTERRUPTED, ""),
}


@pytest.mark.parametrize("failed", [True, False])
@pytest.mark.parametrize("failure", FAILURES)
def test_figures_that_fail(
    failure: str, failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra makes a warning of a callback's error: the list of failed jobs would be lost, and the exit code 0."""
    error, code, said = FAILURES[failure]

    def show(folder: Path) -> None:
        raise error

    monkeypatch.setattr("launch.bench.terminal.show_sweep", show)
    if failed:
        (tmp_path / "failed").mkdir()
        (tmp_path / "failed" / "0-1.txt").write_text("W=1")
    end = {"_target_": "launch.sweep.SweepEnd", "report": True}
    config = OmegaConf.create({"out": None, "hydra": {"sweep": {"dir": str(tmp_path)}, "callbacks": {"end": end}}})
    with pytest.raises(SystemExit) as ended:
        Callbacks(config).on_multirun_end(config=config)
    stderr = capsys.readouterr().err
    assert ended.value.code == (1 if failed and code != INTERRUPTED else code)
    assert said in stderr and ("job 1 failed with exit code 1: W=1" in stderr) == failed


def test_files_beside_the_notes_of_failed_jobs_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every text file in a folder `failed` was deleted when a sweep began; one made meanwhile lost the sweep's end."""
    folder = tmp_path / "failed"
    folder.mkdir()
    for name in ("my notes.txt", "1-a.txt", "7-1.txt"):
        (folder / name).write_text("W=1")
    hydra = {"sweep": {"dir": str(tmp_path)}, "sweeper": {}, "overrides": {"task": ["W=1,2"]}}
    config = OmegaConf.create({"out": None, "hydra": hydra})
    SweepEnd().on_multirun_start(config)
    assert sorted(path.name for path in folder.iterdir()) == ["1-a.txt", "my notes.txt"]
    SweepEnd().on_multirun_end(config)
    (folder / "0-2.txt").write_text("W=1")
    with pytest.raises(SystemExit, match="2"):
        SweepEnd().on_multirun_end(config)
    assert capsys.readouterr().err.startswith("job 1 failed with exit code 2: W=1\n1 failed; ")


def test_a_file_of_somebody_else_among_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep ended with exit code 0, without a table, figures or a word, as if no job had written anything."""
    (tmp_path / "texts.jsonl").write_text('{"prompt": "mine"}\n')
    end = {"_target_": "launch.sweep.SweepEnd", "report": True}
    config = OmegaConf.create({"out": None, "hydra": {"sweep": {"dir": str(tmp_path)}, "callbacks": {"end": end}}})
    with pytest.raises(SystemExit) as ended:
        Callbacks(config).on_multirun_end(config=config)
    stderr = capsys.readouterr().err
    assert ended.value.code == USER_ERROR and stderr.count("\n") == 1
    assert "texts.jsonl, line 1 is no record" in stderr and "move the file away" in stderr
    (tmp_path / "texts.jsonl").unlink()
    Callbacks(config).on_multirun_end(config=config)
    assert capsys.readouterr() == ("", "")


def test_a_table_whose_reader_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich ends the process with 1 by itself: a job of a sweep would be noted as failed."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as ended, reported():
            console_on(pipe, 100).print("a table")
    assert ended.value.code == READER_LEFT
