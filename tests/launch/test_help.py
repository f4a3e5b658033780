"""`lp APP --help`: the keys of an app, from the one place that has them, at the width of the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from rich.console import Console

from launch.apps import APPS
from launch.bench.terminal import empty_table, put
from launch.cli import main, start
from launch.keys import app_keys
from tests.conftest import Processes


def lines_of(text: str) -> list[str]:
    return text.splitlines()


@pytest.mark.parametrize("app", APPS)
def test_every_key_has_its_line(app: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's own page had the keys without a word on any, behind a hundred lines of groups."""
    monkeypatch.setenv("COLUMNS", "60")
    main([app, "--help"])
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).startswith(f"lp {app}: {APPS[app].summary} usage:") and "Hydra is" not in shown
    names = re.findall(r"^  ([\w.]+)=", shown, re.MULTILINE)
    assert {key.name for key in app_keys(app)} <= set(names)
    assert "decoder.draft_depth" in names and "sampling.temperature" in names
    assert ("--prompt TEXT" in shown) == APPS[app].prompts
    long = [line for line in shown.splitlines() if len(line) > 60]
    assert all(len(line.split()) == 1 for line in long), "what has no space to break at is left whole"


def test_the_keys_of_another_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    start("generate", ["decoder=prompt_lookup", "--help"])
    assert "keys of decoder=prompt_lookup" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        start("generate", ["decoder=promt_lookup", "--help"])
    assert "did you mean 'prompt_lookup'?" in capsys.readouterr().err


def test_hydras_own_page_stays_behind_cfg_job(processes: Processes) -> None:
    """All keys with their values, in the form of a file."""
    import sys

    done = processes.run([sys.executable, "-m", "launch.cli", "generate", "--cfg", "job"])
    assert done.returncode == 0 and "max_new_tokens: 64" in done.stdout


@pytest.fixture
def printed() -> Callable[[int], str]:
    def at(width: int) -> str:
        table = empty_table(("method", "tokens", "vs plain", "output"), ("method", "output"), title="2 prompts, greedy")
        table.add_row("lookahead_auto", "256", "2.24x", "3 of 16 part at near-ties")
        table.add_row("plain", "256", "1.00x", "equal")
        console = Console(width=width, file=None, record=True, force_terminal=False)
        with console.capture() as captured:
            put(table, console)
        return captured.get()

    return at


def test_a_table_that_does_not_fit(printed: Callable[[int], str]) -> None:
    """At 60 columns cells were cut off, the verdict first."""
    assert "method" in printed(100)
    for width in (60, 40, 30):
        text = printed(width)
        assert all(len(line.rstrip()) <= width for line in lines_of(text))
        words = " ".join(text.split())
        assert (
            "2 prompts, greedy" in words
            and "lookahead_auto tokens 256, vs plain 2.24x, output 3 of 16 part at" in words
        )
        assert "plain tokens 256, vs plain 1.00x, output equal" in words
