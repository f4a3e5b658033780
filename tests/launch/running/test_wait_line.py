"""What takes long says so: what, how far, for how long yet; and its line never gets in the way of text."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

import lp
from launch.running import wait_line
from launch.running.wait_line import ERASE_LINE, WaitLine, describe, duration, shown_of
from lp.waits import Wait, heard_by, waiting
from tests.conftest import Processes
from tests.support.tiny_models import tiny_model

SILENT_S = 3.0  # that a person waits without a word


@pytest.fixture
def real_model() -> Path:
    """The folder of a trained model with its tokenizer."""
    folder = os.environ.get("LP_REAL_MODEL")
    if not folder:
        pytest.skip("LP_REAL_MODEL names no folder of a real model")
    return Path(folder)


def at(what: str, total: int = 0, done: int = 0) -> Wait:
    return Wait(what=what, total=total, done=done, unit="tokens", began_s=100.0)


def test_what_how_far_and_for_how_long_yet() -> None:
    assert describe(at("reading the prompt", 4096, 1024), 110.0) == (
        "reading the prompt: 1,024 of 4,096 tokens, 10 s, about 30 s left"
    )
    assert describe(at("reading the prompt", 4096), 101.0) == "reading the prompt: 0 of 4,096 tokens, 1 s"
    assert describe(at("loading X"), 160.0) == "loading X (60 s)"
    assert [duration(seconds) for seconds in (0.4, 99, 240, 9000)] == ["0 s", "99 s", "4 min", "2.5 h"]


def test_of_waits_within_each_other_the_one_that_knows_how_far_it_is() -> None:
    """Twelve runs are measured: the line counts them, since one run's prompt says nothing of the end."""
    runs, first, prompt = at("measuring", 12), at("first tokens"), at("reading the prompt", 99)
    assert shown_of([runs, prompt]) is runs
    assert shown_of([first, prompt]) is prompt
    assert shown_of([first, at("compiling")]).what == "compiling"


def shown(terminal: bool, monkeypatch: pytest.MonkeyPatch, for_s: float = 0.3) -> str:
    monkeypatch.setattr(wait_line, "REFRESH_S", 0.01)
    monkeypatch.setattr(wait_line, "SHOWN_AFTER_S", 0.1)
    file = io.StringIO()
    line = WaitLine(file, terminal)
    with heard_by(line):
        with waiting("something quick"):
            pass
        with waiting("loading X"):
            time.sleep(for_s)
        file.write("text")
        with waiting("loading Y"):
            time.sleep(for_s)
    line.close()
    return file.getvalue()


def test_a_line_is_erased_before_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the text would begin behind it, or be erased with it."""
    seen = shown(True, monkeypatch)
    before, _, after = seen.partition("text")
    assert "loading X" in before and before.endswith(ERASE_LINE) and "quick" not in seen
    assert "loading Y" in after and after.endswith(ERASE_LINE)


def test_short_waits_in_a_row_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports, weights, fusing and probing took less than a second each, and nothing was shown of four."""
    monkeypatch.setattr(wait_line, "REFRESH_S", 0.01)
    monkeypatch.setattr(wait_line, "SHOWN_AFTER_S", 0.5)
    file = io.StringIO()
    line = WaitLine(file, True)
    with heard_by(line):
        for number in range(10):
            with waiting(f"part {number}"):
                time.sleep(0.1)
    line.close()
    assert "part 8" in file.getvalue() and "part 0" not in file.getvalue()


def test_a_log_gets_no_line_but_one_of_a_very_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file full of escape codes helps nobody; nor does an hour without a word."""
    assert shown(False, monkeypatch) == "text"
    monkeypatch.setattr(wait_line, "LONG_S", 0.15)
    assert shown(False, monkeypatch) == "loading X (0 s)\ntext"


def test_a_reader_that_has_left_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line is the least of what a run is for."""
    monkeypatch.setattr(wait_line, "REFRESH_S", 0.01)
    monkeypatch.setattr(wait_line, "SHOWN_AFTER_S", 0.0)
    file = io.StringIO()
    line = WaitLine(file, True)
    with heard_by(line), waiting("loading"):
        file.close()
        time.sleep(0.1)
    line.close()


class Heard:
    """Keeps what it hears of."""

    def __init__(self) -> None:
        self.ended: list[Wait] = []

    def begins(self, wait: Wait) -> None: ...

    def ends(self, wait: Wait) -> None:
        self.ended.append(wait)


def test_the_runtime_says_what_it_is_at() -> None:
    """Making a decoder and reading a long prompt are what a user of a large model waits for."""
    heard = Heard()
    with heard_by(heard):
        lp.LookaheadDecoder(tiny_model()).generate(list(range(1, 40)), 4)
    what = [wait.what for wait in heard.ended]
    assert "fusing the layers" in what and any("tree mask" in each for each in what)
    prompt = next(wait for wait in heard.ended if wait.what == "reading the prompt")
    assert (prompt.done, prompt.total) == (38, 38)


class OnATerminal(NamedTuple):
    """What a command did."""

    silences: list[tuple[float, str]]  # seconds without a word, and what was said before; the longest first
    text: str
    code: int


def on_a_terminal(command: list[str], env: dict[str, str], processes: Processes, until: str = "") -> OnATerminal:
    """Run a command on a terminal; Ctrl-C ends it as soon as it says `until`."""
    master, slave = pty.openpty()
    options = {"stdin": subprocess.DEVNULL, "stdout": slave, "stderr": slave}
    process = processes.start(command, {"TERM": "xterm", **env}, **options)
    os.close(slave)
    found, last_s, before, said = [], time.monotonic(), "(its start)", ""
    while True:
        ready = select.select([master], [], [], 0.2)[0]
        now_s = time.monotonic()
        if not ready:
            continue
        try:
            text = os.read(master, 65536).decode("utf-8", "replace")
        except OSError:
            break
        found.append((now_s - last_s, before))
        last_s, before = now_s, text
        if until and until not in said and until in said + text:
            os.killpg(process.pid, signal.SIGINT)
        said += text
    found.append((time.monotonic() - last_s, before))
    os.close(master)
    return OnATerminal(sorted(found, reverse=True), said, process.wait(60))


@pytest.fixture(scope="module")
def numba_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty for the first app, which compiles what the others find."""
    return tmp_path_factory.mktemp("numba")


FEW = ["max_new_tokens=8"]
# What each app is asked to do, what it says in the end, and whether Ctrl-C ends it then.
ASKED: dict[str, tuple[list[str], str, bool]] = {
    "benchmark": ([*FEW, "repeats=1", "limit=1", "methods=[lookahead,plain]"], "records: ", False),
    "generate": (["def quicksort(a):", "max_new_tokens=24", "compare=false"], "tokens", False),
    "generate compare": (["def quicksort(a):", "max_new_tokens=24", "compare=true", "repeats=1"], "vs plain", False),
    "tune": ([*FEW, "prompt=x", "repeats=1"], "figure: ", False),
    "profile": ([*FEW, "prefix=64", "tokens=[1,16]", "rounds=1"], "t(T)", False),
    "scaling": ([*FEW, "prompt=x", "ranks=[]", "project=true", "projected_ranks=[1,2]"], "written to", False),
    "chat": (FEW, "", False),
    "serve": ([*FEW, "port=0"], "serving ", True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_a_real_model_on_a_terminal_is_never_silent_for_long(
    name: str, processes: Processes, tmp_path: Path, numba_cache: Path, real_model: Path
) -> None:
    """Seconds without a word look like a hang: imports, weights, probes, compiling and measuring take many."""
    asked, said, interrupted = ASKED[name]
    first = name.startswith("generate")  # nobody waits there for the compiling, which has a folder of its own
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": str(tmp_path if first else numba_cache)}
    command = [sys.executable, "-m", "launch.cli", name.split()[0], "model=hf", f"model.name={real_model}", *asked]
    folder = [f"hydra.run.dir={tmp_path / 'run'}"]
    ran = on_a_terminal([*command, *folder], {**cache, "LP_COMPILE": ""}, processes, said if interrupted else "")
    assert ran.code == 0 and said in ran.text, ran.text[-2000:]
    assert ran.silences[0][0] <= SILENT_S, ran.silences[:5]


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["doctor", "ngrams"])
def test_a_tool_on_a_terminal_is_never_silent_for_long(
    tool: str, processes: Processes, tmp_path: Path, real_model: Path
) -> None:
    """A vocabulary behind one beginning takes minutes; what it shows of the first seconds shows that."""
    output = ["--output", str(tmp_path / "x.npy"), "--tokens", "64"] if tool == "ngrams" else []
    command = [sys.executable, "-m", "launch.cli", tool, str(real_model), *output]
    until = " 2,0" if tool == "ngrams" else ""
    ran = on_a_terminal(command, {"XDG_CACHE_HOME": str(tmp_path / "cache")}, processes, until)
    assert ran.code == (130 if until else 0) and ran.silences[0][0] <= SILENT_S, (ran.code, ran.silences[:5])
