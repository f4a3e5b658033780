"""Source of a chat's lines: a terminal with line editing, or a pipe."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from lp.errors import UserError

PROMPT = "> "
MORE = ". "
FENCE = '"""'
MARKS_ON, MARKS_OFF = "\x1b[?2004h", "\x1b[?2004l"  # around pasted blocks
PASTE, PASTED = "\x1b[200~", "\x1b[201~"  # the marks
HISTORY_LINES = 1000


class Keyboard:
    """Reads a chat's messages from stdin, one per line.

    Two things are one message of several lines: a block between \"\"\" and \"\"\", and a block pasted into a terminal.

    Args:
        history_file: file of lines typed in former chats, which a terminal's arrow keys bring back; None: lines are not
            kept.

    Raises:
        ValueError: stdin is closed, or the history file cannot be read or written.
    """

    def __init__(self, history_file: str | None = None) -> None:
        if sys.stdin is None:
            raise UserError("stdin is closed; give the chat a terminal, or a pipe with a line for every turn")
        self._terminal = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # one bad byte must not end a chat
        self._history = _edit_lines(history_file) if self._terminal else None
        self._marks = self._terminal and not _readline_takes_pastes()

    def close(self) -> None:
        """Save the typed lines to the history file, if there is one."""
        if self._history is not None:
            import readline

            with contextlib.suppress(OSError):  # a disk that is full is no reason to end a chat with a traceback
                readline.write_history_file(self._history)

    def read(self) -> str | None:
        """The next message; None when the user leaves: Ctrl-D, the end of a pipe, or Ctrl-C twice at the prompt.

        Raises:
            KeyboardInterrupt: Ctrl-C while reading a pipe.
        """
        warned = False
        while True:
            try:
                return self._text()
            except EOFError:
                if self._terminal:
                    print()
                return None
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                if warned:
                    print()
                    return None
                print("\n(Ctrl-C again, Ctrl-D or /exit to leave)")
                warned = True

    def _text(self) -> str:
        line = self._line(PROMPT)
        if not line.startswith(FENCE):
            return line
        if "\n" in line and not _is_fenced(line):  # a pasted block, which may be code that begins with a docstring
            return line
        text = line.removeprefix(FENCE)
        while not text.rstrip("\n").endswith(FENCE):  # a paste may end with a line's end
            text += "\n" + self._line(MORE)
        return text.rstrip("\n").removesuffix(FENCE).removeprefix("\n")

    def _line(self, prompt: str) -> str:
        if self._terminal:
            line = self._with_marks(prompt) if self._marks else input(prompt)
            return line.removesuffix("\n")  # of a block that was pasted with it
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _with_marks(self, prompt: str) -> str:
        """Read a line, or a pasted block: the terminal puts PASTE before it and PASTED behind it."""
        print(MARKS_ON, end="", flush=True)
        try:
            line = input(prompt)
            while line.rfind(PASTE) > line.rfind(PASTED):
                line += "\n" + input()
        finally:
            print(MARKS_OFF, end="", flush=True)
        return line.replace(PASTE, "").replace(PASTED, "")


def _is_fenced(block: str) -> bool:
    """Whether a whole pasted block stands between \"\"\" and \"\"\", the first of them on a line of its own."""
    first, _, rest = block.partition("\n")
    return first == FENCE and rest.rstrip("\n").endswith(FENCE)


def _readline_takes_pastes() -> bool:
    """Make GNU readline take a pasted block as one line; False without readline, where the terminal's marks are read.

    libedit, which takes its place on macOS, knows no pasted blocks and would show the marks: True for it too.
    """
    try:
        import readline
    except ImportError:
        return False
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # which Python turns off
    return True


def _edit_lines(history_file: str | None) -> Path | None:
    """Load the typed lines of former chats into readline; return the file to save them in, None without one."""
    try:
        import readline
    except ImportError:
        return None
    if history_file is None:
        return None
    path = Path(history_file).expanduser()
    try:
        path.touch()
        readline.read_history_file(path)
    except OSError as error:
        raise UserError(f"history_file {path}: {error.strerror}; give a file that can be written") from None
    readline.set_history_length(HISTORY_LINES)
    return path
