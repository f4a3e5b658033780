"""What takes long says so: what, how far, for how long yet; and its line never gets in the way of text."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest

import lp
from launch import wait_line
from launch.wait_line import ERASE_LINE, WaitLine, describe, duration, shown_of
from lp.waits import Wait, heard_by, waiting
from tests.conftest import Processes
from tests.tiny_models import tiny_model

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
    """Of twelve runs, one run's prompt says nothing of the end."""
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


def silences_s(command: list[str], env: dict[str, str], processes: Processes) -> tuple[list[tuple[float, str]], int]:
    """How long a command on a terminal says nothing, with what it said before; and its exit code."""
    master, slave = pty.openpty()
    process = processes.start(command, {"TERM": "xterm", **env}, stdout=slave, stderr=slave)
    os.close(slave)
    found, last_s, before = [], time.monotonic(), "(its start)"
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
    os.close(master)
    return sorted(found, reverse=True), process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("compare", ["true", "false"])
def test_a_real_model_on_a_terminal_is_never_silent_for_long(
    compare: str, processes: Processes, tmp_path: Path, real_model: Path
) -> None:
    """Seconds without a word look like a hang: imports, weights, probes, compiling and measuring take many."""
    asked = ["def quicksort(a):", "model=hf", f"model.name={real_model}", "max_new_tokens=24", f"compare={compare}"]
    empty = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    silences, code = silences_s([sys.executable, "-m", "lp", "generate", *asked, "repeats=1"], empty, processes)
    assert code == 0 and silences[0][0] <= SILENT_S, silences[:5]
