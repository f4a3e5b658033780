"""Where a chat's lines come from, and how every rank gets them."""

from __future__ import annotations

import inspect
import io
import os
import pty
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.chat.keyboard import Keyboard
from lp.errors import RankLost
from lp.parallel.context import ParallelContext
from lp.parallel.rank_group import ProcessRankGroup
from lp.parallel.thread_ranks import run_lockstep


class Terminal(io.StringIO):
    """stdin that calls itself a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Keyboard]:
    """A keyboard at a terminal; an exception stands for the key that raises it."""

    def at(*keys: Any, **options: Any) -> Keyboard:
        left = list(keys)

        def read(prompt: str) -> str:
            key = left.pop(0)
            if isinstance(key, str):
                return key
            raise key

        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr("builtins.input", read)
        return Keyboard(**options)

    return at


def test_ctrl_c_at_the_prompt_leaves_when_pressed_twice(typed: Callable[..., Keyboard]) -> None:
    """The first one may have been meant for an answer that had just ended, or for the line being typed."""
    keyboard = typed(KeyboardInterrupt, "a", KeyboardInterrupt, KeyboardInterrupt)
    assert keyboard.read() == "a"
    assert keyboard.read() is None


def test_ctrl_c_drops_an_open_text(typed: Callable[..., Keyboard], capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever opened three quotes by mistake must get out of them."""
    assert typed('"""a', "b", KeyboardInterrupt, "c").read() == "c"
    assert capsys.readouterr().out == "\n(Ctrl-C again, Ctrl-D or /exit to leave)\n"


def test_ctrl_d_ends(typed: Callable[..., Keyboard]) -> None:
    assert typed(EOFError).read() is None


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        ("a\nb", ["a", "b", None]),
        ('"""\na\n\nb"""\n', ["a\n\nb", None]),
        ('"""a"""\n""""""\n', ["a", "", None]),
        ('"""a\n', [None]),
        ("", [None]),
    ],
)
def test_a_pipe(monkeypatch: pytest.MonkeyPatch, lines: str, texts: list[str | None]) -> None:
    """The last line may lack its newline, and three quotes their end."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    keyboard = Keyboard()
    assert [keyboard.read() for _ in texts] == texts


def test_ctrl_c_in_a_pipe_ends_as_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script cannot press it twice."""

    class Stopped(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Stopped())
    with pytest.raises(KeyboardInterrupt):
        Keyboard().read()


def test_bytes_that_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in another encoding used to end the chat with a traceback."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    assert Keyboard().read() == "caf\N{REPLACEMENT CHARACTER}"


def test_lines_are_kept_in_a_file_only_if_asked(typed: Callable[..., Keyboard], tmp_path: Path) -> None:
    """What is typed may be secret."""
    readline = pytest.importorskip("readline")
    readline.clear_history()
    readline.add_history("secret")
    typed().close()
    assert list(tmp_path.iterdir()) == []
    keyboard = typed(history_file=str(tmp_path / "lines"))
    readline.add_history("kept")
    keyboard.close()
    readline.clear_history()
    assert "kept" in (tmp_path / "lines").read_text()
    typed(history_file=str(tmp_path / "lines"))
    assert "kept" in [readline.get_history_item(i + 1) for i in range(readline.get_current_history_length())]
    readline.clear_history()
    with pytest.raises(ValueError, match=r"history_file .*/none/lines: No such file or directory; give a file"):
        typed(history_file=str(tmp_path / "none" / "lines"))


@pytest.mark.parametrize(
    ("pasted", "text"),
    [
        ('"""Doc."""\n\nimport os', '"""Doc."""\n\nimport os'),
        ('"""Doc.\n\nMore.\n"""\nx = 1\n', '"""Doc.\n\nMore.\n"""\nx = 1'),
        ('"""\nDoc.\n"""\nx = 1', '"""\nDoc.\n"""\nx = 1'),
        ('"""Doc.\n"""', '"""Doc.\n"""'),
        ('"""\nx', '"""\nx'),
        ('"""\nx\n"""\n', "x\n"),
        ('"""\nx"""', "x"),
        ('x\n"""a"""', 'x\n"""a"""'),
    ],
)
def test_a_pasted_block_that_begins_with_quotes(typed: Callable[..., Keyboard], pasted: str, text: str) -> None:
    """Python code that begins with a docstring asked for more lines, and took the next message with it."""
    keyboard = typed(pasted, "next", EOFError)
    assert [keyboard.read() for _ in range(3)] == [text, "next", None]


# The module by itself: its package imports torch, which takes seconds.
PASTING = """
import runpy, sys
if {without}:
    sys.modules["readline"] = None
keyboard = runpy.run_path("{module}")["Keyboard"]()
text = ""
while text is not None:
    text = keyboard.read()
    print("read", ascii(text), flush=True)
"""


@pytest.mark.parametrize("without", [False, True])
def test_a_pasted_block_is_one_text(without: bool) -> None:
    """Each of its lines was a turn of its own, as Python turns off what readline does; also where there is none."""
    if not without:
        readline = pytest.importorskip("readline")
        if "libedit" in (readline.__doc__ or ""):
            pytest.skip("this Python edits lines with libedit, which knows no pasted blocks")
    child, terminal = pty.fork()
    if not child:
        os.environ["TERM"] = "xterm"
        script = PASTING.format(without=without, module=inspect.getfile(Keyboard))
        os.execv(sys.executable, [sys.executable, "-c", script])
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            ready, _, _ = select.select([terminal], [], [], 120)
            assert ready, seen
            seen += os.read(terminal, 4096)
        seen = seen.partition(text)[2]

    def paste(text: str) -> bytes:
        return f"\x1b[200~{text}\x1b[201~".encode()

    try:
        for keys, text in [
            (paste("one\r\ttwo\r\r/exit") + b" three\r", r"read 'one\n\ttwo\n\n/exit three'"),
            (b"typed\r", "read 'typed'"),
            (paste("one line\r") + b"\r", "read 'one line'"),
            (b"see " + paste("a\rb") + b" and " + paste("c") + b"\r", r"read 'see a\nb and c'"),
            (paste('"""\rx\r"""\r') + b"\r", "read 'x\\n'"),
            (b"\x04", "read None"),
        ]:
            until(b"\x1b[?2004h" if keys != b"\x04" else b"> ")
            os.write(terminal, keys)
            until(text.encode())
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


@pytest.mark.parametrize("text", ["naïve 🙂\n", "", None, "x" * 10000])
def test_every_rank_gets_the_text_of_rank_0(text: str | None) -> None:
    """The length goes first: ranks do not know it; an empty text is not the end."""
    shared = run_lockstep(3, lambda context: context.share_text(text if context.is_main else "not looked at"))
    assert shared == [text] * 3
    assert ParallelContext().share_text(text) == text


def test_a_rank_lost_while_the_others_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line finds a closed connection: gloo's words for it are no message for a user."""

    class Closed:
        def allgather(self, *args: Any) -> None:
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("lp.parallel.rank_group.announce", lambda rank, call: None)
    monkeypatch.setattr("lp.parallel.rank_group.roll_call", lambda rank, world_size: "rank 1 does not answer")
    ranks = ProcessRankGroup(size=2, messages=Closed(), home=(0, 2))  # type: ignore[arg-type]
    context = ParallelContext(world_size=2, backend="gloo", ranks=ranks)
    with pytest.raises(RankLost, match=r"rank 1 does not answer, so rank 0 stops \(Connection closed by peer\)"):
        context.share_text("line")


def test_a_closed_stdin_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch.chat <&-`, as some supervisors start it, has no stdin at all."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="stdin is closed; give"):
        Keyboard()
