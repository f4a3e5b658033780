"""A disk that becomes read-only before any write of an app: what was generated is there, and one line says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import launch.scaling
from launch.bench.runs import ModelCache
from launch.bench.scaling_lines import MEASURED, Line
from launch.benchmark import benchmark
from launch.profile import profile_model
from launch.running.jobs import folder_of_run
from launch.tune import tune
from tests.conftest import LONG
from tests.support.apps import Ran
from tests.support.read_only import read_only

FEW = 4  # places of each app in the short form
UNLIMITED = 1 << 30


def _generate(start: dict[str, Callable[..., Ran]], folder: Path, model: list[str]) -> Ran:
    kept = [f"journal={folder}/journal.jsonl", "pool.scope=session", f"pool.file={folder}/pool"]
    return start["generate"](*model, *kept, "limit=1", "compare=false", f"hydra.run.dir={folder}/run")


def _chat(start: dict[str, Callable[..., Ran]], folder: Path, model: list[str]) -> Ran:
    return start["chat"]("hello\n", *model, f"history_file={folder}/history", f"hydra.run.dir={folder}/run")


def _benchmark(start: dict[str, Callable[..., Ran]], folder: Path, model: list[str]) -> Ran:
    asked = [f"out={folder}/out", "task=builtin", "limit=2", "methods=[lookahead,plain]"]
    task = partial(benchmark, models=ModelCache())
    return start["app"](task, "benchmark", *model, *asked, f"hydra.run.dir={folder}/run")


def _sweep(start: dict[str, Callable[..., Ran]], folder: Path, model: list[str]) -> Ran:
    asked = ["-m", "task=builtin", "limit=1", "methods=[lookahead,plain]", "N=2,3"]
    task = partial(benchmark, models=ModelCache())
    return start["app"](task, "benchmark", *asked, *model, f"hydra.sweep.dir={folder}/sweep")


def _profile(start: dict[str, Callable[..., Ran]], folder: Path, model: list[str]) -> Ran:
    asked = ["R=2", "rank=0", "rounds=1", "compare=false", "tokens=[1,8]", "prefix=16", f"hydra.run.dir={folder}/run"]
    return start["app"](profile_model, "profile", *model, *asked)


def _tune(start: dict[str, Callable[..., Ran]], folder: Path, model: list[str]) -> Ran:
    asked = ["task=builtin", "limit=1", f"hydra.run.dir={folder}/run"]
    return start["app"](tune, "tune", *model, *asked)


def _scaling(start: dict[str, Callable[..., Ran]], folder: Path, model: list[str]) -> Ran:
    """Its report alone: its launches are benchmarks."""
    of_two = {"kind": MEASURED, "link": None, "W": 4, "G": 4, "tokens_per_s": 20.0, "speedup": 2.0}
    of_two |= {"forward_ms": 1.0, "exchange_ms": 0.1, "host_ms": 0.1, "efficiency": None}
    lines = [Line(method="lookahead", ranks=2, compression=2.0, num_tokens=9.0, **of_two)]

    def report(config: object) -> None:
        launch.scaling.report(lines, {}, "caption", folder_of_run(), True)

    return start["app"](report, "scaling", f"hydra.run.dir={folder}/run")


def _texts(ran: Ran) -> str:
    """What an app printed before its table."""
    return ran.out.split("  method")[0]


APPS = {
    "generate": _generate,
    "chat": _chat,
    "benchmark": _benchmark,
    "sweep": _sweep,
    "scaling": _scaling,
    "profile": _profile,
    "tune": _tune,
}
# By app: the first write from which on its run gets as far as its output, and a part of that. Chat opens its files at
# the start, as a benchmark does its records, and both end there.
OUTPUT = {
    "generate": (2, "=== builtin"),
    "sweep": (6, "  lookahead "),
    "scaling": (1, "| lookahead |"),
    "profile": (1, "host"),
    "tune": (1, "best fixed"),
}


@pytest.mark.subset(2)
@pytest.mark.parametrize("app", [*APPS] if LONG else [app for app in APPS if app != "tune"])  # which takes long
def test_a_disk_that_becomes_read_only(
    app: str,
    start_app: Callable[..., Ran],
    launch_generate: Callable[..., Ran],
    launch_chat: Callable[..., Ran],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A traceback of ours for a folder that cannot be written says nothing to its user."""
    monkeypatch.chdir(tmp_path)
    start = {"app": start_app, "generate": launch_generate, "chat": launch_chat}
    model = ["model=hf", f"model.name={tiny_folder}", "model.dtype=float64", "max_new_tokens=8"]
    (tmp_path / "whole").mkdir()
    with read_only(tmp_path / "whole", UNLIMITED) as disk:
        whole = APPS[app](start, tmp_path / "whole", model)
    assert whole.code == 0, whole.err
    writes = disk.writes
    first, output = OUTPUT.get(app, (writes, "nothing"))
    for after in range(writes) if LONG else sorted({writes * place // FEW for place in range(FEW)}):
        folder = tmp_path / f"{after}"
        folder.mkdir()
        with read_only(folder, after) as disk, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            ran = APPS[app](start, folder, model)
        said = ran.err + "".join(str(warning.message) for warning in warned)
        print(f"{app}: read-only after {after} of {writes} writes: exit code {ran.code}: {said.strip()}")
        assert disk.writes > after, "nothing was refused"
        assert "Read-only file system" in said
        assert "Traceback" not in said and "Error executing job" not in said and " raised OSError" not in said
        assert ran.code == (0 if app == "generate" and after >= first else 2)
        assert (output in ran.out) == (after >= first), "what was generated, or took minutes to measure"
        unnoted = app == "sweep" and "give another out=" in said  # a job that failed, which can't be noted
        assert ("the sweep ends here: cannot write" in said) == unnoted
        if app == "generate" and after >= first:
            assert _texts(ran) == _texts(whole)


@pytest.mark.parametrize("app", ["scaling", "tune"] if LONG else ["scaling"])
def test_files_are_written_where_nothing_can_be_printed(
    app: str, start_app: Callable[..., Ran], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round: a log on a disk that is full must not take what was measured with it."""
    model = ["model=hf", f"model.name={tiny_folder}", "model.dtype=float64", "max_new_tokens=8"]
    with open("/dev/full", "w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        ran = APPS[app]({"app": start_app}, tmp_path, model)
    assert ran.code == 2 and "No space left on device" in ran.err
    written = {path.name for path in (tmp_path / "run").rglob("*")}
    assert written >= ({"scaling.csv", "scaling.md"} if app == "scaling" else {"tune.json", "tuned.yaml"})
