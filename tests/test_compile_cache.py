"""lp.compile_cache: nobody waits for numba before a first token, and one process compiles for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.apps import APPS
from launch.cli import needs_compiled
from lp import compile_cache
from tests.conftest import Processes

pytest.importorskip("numba", reason="numba is not installed: nothing is compiled")
SHOW = "from lp.compiled import COMPILED; print(COMPILED)"
RUN = "import lp; print(len(lp.LookaheadDecoder(lp.load('demo').model).generate([5, 6, 7], 4).tokens))"


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without compiled functions, as it is right after an install."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("NUMBA_DISABLE_JIT", raising=False)
    monkeypatch.delenv("LP_COMPILE", raising=False)
    for cached in (compile_cache.cache_folder, compile_cache.complete_in_background):
        cached.cache_clear()
        monkeypatch.setattr(compile_cache, cached.__name__, cached.__wrapped__)
    return tmp_path


class Started:
    """Takes the place of subprocess.Popen: notes what would have been started."""

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
    compile_cache.complete()
    assert not compile_cache.is_complete(), "it failed"
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


CLI, MODULE = "import launch.cli", "import launch.{0}, launch.cli"  # `lp benchmark`, and `python -m launch.benchmark`
# What compiles is replaced: functions that are never called need not be compiled.
FIRST_RUN = """
import atexit, sys
import lp.compile_cache as cache
class Compiling:
    def __init__(self, nice=0):
        print("compiling", flush=True)
    def wait(self):
        {0}
cache._start = Compiling
{1}
atexit.register(lambda: print(getattr(sys.modules.get("lp.compiled"), "COMPILED", None)))
print("begins", flush=True)
launch.cli.start(sys.argv[1], sys.argv[2:])
"""


def first_run(
    processes: Processes, tmp_path: Path, args: list[str], imports: str = CLI, wait: str = "cache.mark_complete()"
) -> subprocess.CompletedProcess[str]:
    """An app's run right after an install, in a folder of its own."""
    (tmp_path / "first_run.py").write_text(FIRST_RUN.format(wait, imports.format(args[0])))
    env = {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "LP_COMPILE": "", "NUMBA_DISABLE_JIT": "0"}
    return processes.run([sys.executable, str(tmp_path / "first_run.py"), *args], env, cwd=tmp_path)


REFUSED = ["max_new_tokens=0", "limit=1"]


@pytest.mark.subset(1)
@pytest.mark.parametrize("name", ["benchmark", "tune", "generate"])
def test_a_first_run_ends_as_any_other(name: str, processes: Processes, tmp_path: Path) -> None:
    """What waits for the compiling must leave nothing behind: the run that began again showed every user error as a
    traceback with exit code 1, because Hydra's switch was in its environment.
    """
    ran = first_run(processes, tmp_path, [name, *REFUSED, *(["compare=true"] if name == "generate" else [])])
    assert ran.returncode == 2 and ran.stderr.startswith("error: max_new_tokens is 0"), ran.stderr
    assert ran.stdout.split() == ["begins", "compiling", "True"] and "Traceback" not in ran.stderr
    assert not [*tmp_path.glob("outputs/*/*")]


@pytest.mark.slow  # half a minute: it compiles in two processes
def test_a_module_of_a_clone_begins_again(processes: Processes, tmp_path: Path) -> None:
    """`python -m launch.benchmark` has imported lp's functions, as Python, before anything can be compiled."""
    ran = first_run(processes, tmp_path, ["benchmark", *REFUSED], MODULE)
    assert ran.returncode == 2 and ran.stderr.startswith("error: max_new_tokens is 0"), ran.stderr
    assert ran.stdout.split() == ["begins", "compiling", "begins", "True"]


def test_a_prompt_from_stdin_is_not_lost(processes: Processes, tmp_path: Path) -> None:
    """A process that begins again would find its standard input at the end."""
    ran = first_run(processes, tmp_path, ["benchmark", "--prompt", "-", "max_new_tokens=0"], MODULE)
    assert ran.returncode == 2 and ran.stdout.split() == ["begins", "compiling", "False"]


@pytest.mark.parametrize("end, code", [("raise KeyboardInterrupt", 130), ("raise OSError(7, 'too long')", 2)])
def test_compiling_that_ends_early(end: str, code: int, processes: Processes, tmp_path: Path) -> None:
    """Ctrl-C ends the app, and functions that can't be compiled run as Python."""
    ran = first_run(processes, tmp_path, ["benchmark", *REFUSED], wait=end)
    assert ran.returncode == code and "Traceback" not in ran.stderr


def test_which_runs_wait_for_the_compiling() -> None:
    """A minute before a config is shown, or before a text, is for nothing."""
    assert [name for name, app in APPS.items() if needs_compiled(app, ["W=3"])] == [
        *("serve", "batch", "benchmark", "scaling", "profile", "tune")
    ]
    assert not any(needs_compiled(app, ["--cfg", "job"]) for app in APPS.values())
    asked = {"compare=true": True, "++compare=True": True, "compare=true,false": True, "experiment=demo": True}
    asked |= {"compare=false": False, "model=demo": False}
    assert {each: needs_compiled(APPS["generate"], [each]) for each in asked} == asked


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
