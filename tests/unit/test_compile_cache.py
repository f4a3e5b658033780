"""lp.compile_cache: nobody waits for numba before a first token, and one process compiles for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.apps import APPS
from launch.cli import start
from lp import compile_cache
from tests.conftest import Processes

pytest.importorskip("numba", reason="numba is not installed: nothing is compiled")
SHOW = "from lp.compiled import COMPILED; print(COMPILED)"
RUN = "import lp; print(len(lp.LookaheadDecoder(lp.load('demo').model).generate([5, 6, 7], 4).tokens))"


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As right after an install: a folder without compiled functions."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("NUMBA_DISABLE_JIT", raising=False)
    monkeypatch.delenv("LP_COMPILE", raising=False)
    for cached in (compile_cache.cache_folder, compile_cache.complete_in_background):
        cached.cache_clear()
        monkeypatch.setattr(compile_cache, cached.__name__, cached.__wrapped__)
    return tmp_path


class Started:
    """In place of subprocess.Popen: what would have been started."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.waited = 0
        self.env: dict[str, str] = {}

    def __call__(self, command: list[str], *, env: dict[str, str], **options: Any) -> Started:
        assert options["start_new_session"] and options["stdout"] == subprocess.DEVNULL
        self.commands.append(command)
        self.env = env
        return self

    def wait(self) -> None:
        self.waited += 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    double = Started()
    monkeypatch.setattr(compile_cache.subprocess, "Popen", double)
    return double


def test_functions_run_as_python_until_they_are_compiled(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_cache.is_wanted() and not compile_cache.runs_compiled()
    assert "being compiled in the background" in compile_cache.why_not_compiled()
    compile_cache.mark_complete()
    assert compile_cache.runs_compiled()
    monkeypatch.setattr(compile_cache, "version", lambda name: "0.0.1")  # another release compiles anew
    assert not compile_cache.runs_compiled()
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert not compile_cache.is_wanted() and "switched off" in compile_cache.why_not_compiled()


def test_now_compiles_within_the_process(fresh: Path, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LP_COMPILE", "now")
    assert compile_cache.runs_compiled()
    compile_cache.complete()
    compile_cache.complete_in_background()
    assert started.commands == []


def test_what_is_started(fresh: Path, started: Started) -> None:
    """In the background it gives way to everything else and nobody waits; a measurement waits."""
    compile_cache.complete_in_background()
    assert started.commands == [[sys.executable, "-m", "lp.compile_functions", "19"]] and not started.waited
    assert started.env["LP_COMPILE"] == "now" and started.env["CUDA_VISIBLE_DEVICES"] == ""
    assert str(Path(compile_cache.__file__).parent.parent) in started.env["PYTHONPATH"].split(os.pathsep)
    assert not compile_cache.complete(), "it failed"
    assert started.commands[1:] == [[sys.executable, "-m", "lp.compile_functions", "0"]] and started.waited == 1
    compile_cache.mark_complete()
    compile_cache.complete()
    compile_cache.complete_in_background()
    assert len(started.commands) == 2


def test_nothing_can_be_kept(fresh: Path, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder that can be written, every process would compile for a minute."""
    monkeypatch.setattr(compile_cache, "cache_folder", lambda: None)
    assert not compile_cache.runs_compiled() and "no folder" in compile_cache.why_not_compiled()
    compile_cache.complete()
    compile_cache.complete_in_background()
    assert started.commands == []


def test_a_first_run_decodes_at_once(processes: Processes, tmp_path: Path) -> None:
    """In a process of its own, with what it starts replaced, so that nothing outlives the test."""
    env = {"NUMBA_CACHE_DIR": str(tmp_path), "LP_COMPILE": "", "NUMBA_DISABLE_JIT": "0"}
    no_process = "import lp.compile_cache as c; c._start = lambda nice=0: print('started', nice); "
    ran = processes.run([sys.executable, "-c", no_process + RUN + "; " + SHOW], env)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n") == ["started 19", "4", "False", ""]


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("missing", [True, False])
def test_apps_that_measure_compile_first(name: str, missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And begin again: lp's functions were imported as Python with the app's settings."""
    seen: list[str] = []
    monkeypatch.setattr("launch.cli.complete", lambda: seen.append("compiled") or missing)
    monkeypatch.setattr("launch.cli.os.execv", lambda program, command: seen.append("again"))
    monkeypatch.setattr("launch.cli.import_module", lambda *of: seen.append("imported") or _ends())
    monkeypatch.setattr("launch.app.run", lambda task, config_name: task(None))
    with pytest.raises(KeyError):
        start(name, [])
    first = ["compiled", *(["again"] if missing else [])]
    assert seen == (first if APPS[name].measures else []) + ["imported"]


def test_a_prompt_from_stdin_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that begins again would find its standard input at the end."""
    monkeypatch.setattr("launch.cli.complete", lambda: True)
    monkeypatch.setattr("launch.cli.os.execv", lambda program, command: pytest.fail("it began again"))
    monkeypatch.setattr("launch.arguments.read_stdin", lambda: "def f(")
    monkeypatch.setattr("launch.cli.import_module", lambda *of: _ends())
    monkeypatch.setattr("launch.app.run", lambda task, config_name: task(SimpleNamespace(compare=True)))
    with pytest.raises(KeyError):
        start("generate", ["-", "compare=true"])


def _ends() -> None:
    raise KeyError


@pytest.mark.slow  # a minute and a half of one core
def test_all_functions_are_compiled(processes: Processes, tmp_path: Path) -> None:
    """Texts of all kinds compile nothing that the process in the background did not."""
    env = {"NUMBA_CACHE_DIR": str(tmp_path)}
    ran = processes.run([sys.executable, "-m", "lp.compile_functions"], env)
    assert ran.returncode == 0, ran.stderr
    compiled = sorted(tmp_path.rglob("*.nbc"))
    assert len(compiled) > 60 and list(tmp_path.rglob("complete-*"))
    ran = processes.run([sys.executable, "scripts/fuzz.py", "--cases", "12"], env)
    assert ran.returncode == 0, ran.stderr
    assert sorted(tmp_path.rglob("*.nbc")) == compiled
