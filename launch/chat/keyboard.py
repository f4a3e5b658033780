"""Where a chat's lines come from: a terminal with its line editor, or a pipe."""

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
    """Reads stdin line by line; `\"\"\"` begins and ends a text of several lines, and a pasted block is one text.

    Args:
        history_file: lines of former chats, for the arrow keys of a terminal; None: none.

    Raises:
        ValueError: stdin is closed, or a history file cannot be read or written.
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
        """Save the lines that were typed, if there is a file for them."""
        if self._history is not None:
            import readline

            with contextlib.suppress(OSError):  # a disk that is full is no reason to end a chat with a traceback
                readline.write_history_file(self._history)

    def read(self) -> str | None:
        """What was typed, or None for the end: Ctrl-D, the end of a pipe, or Ctrl-C twice at the prompt.

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
        """A line, or a block of them between the marks that the terminal sets around what is pasted."""
        print(MARKS_ON, end="", flush=True)
        try:
            line = input(prompt)
            while line.rfind(PASTE) > line.rfind(PASTED):
                line += "\n" + input()
        finally:
            print(MARKS_OFF, end="", flush=True)
        return line.replace(PASTE, "").replace(PASTED, "")


def _is_fenced(block: str) -> bool:
    """Whether all of a block is between quotes, the first of which have a line of their own."""
    first, _, rest = block.partition("\n")
    return first == FENCE and rest.rstrip("\n").endswith(FENCE)


def _readline_takes_pastes() -> bool:
    """Let GNU readline put a pasted block into one line; whether there is a line editor at all.

    Others than GNU's know no pasted blocks, and would show marks of them.
    """
    try:
        import readline
    except ImportError:
        return False
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # which Python turns off
    return True


def _edit_lines(history_file: str | None) -> Path | None:
    """Arrow keys and the lines typed before, where Python has readline; returns the file to save them in."""
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
