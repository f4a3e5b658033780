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
HISTORY_LINES = 1000


class Keyboard:
    """Reads stdin line by line; `\"\"\"` begins and ends a text of several lines.

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
        text = line.removeprefix(FENCE)
        while not text.endswith(FENCE):
            text += "\n" + self._line(MORE)
        return text.removesuffix(FENCE).removeprefix("\n")

    def _line(self, prompt: str) -> str:
        if self._terminal:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


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
