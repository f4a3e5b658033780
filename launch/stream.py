"""Text as it is generated, in colours that show what came in one step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TextIO

from transformers import PreTrainedTokenizerBase

from lp.engine.interrupts import Interrupted
from lp.engine.output import GenerationOutput
from lp.engine.request import OnTokens
from lp.parallel.context import ParallelContext

from .detokenizer import Detokenizer

RESET, DIM, ERASE_LINE = "\x1b[0m", "\x1b[2m", "\r\x1b[2K"
STEP_COLOURS = {2: "\x1b[36m", 3: "\x1b[32m", 4: "\x1b[33m", 5: "\x1b[35m"}  # by the tokens of a step, 5 and more alike


def shows_colours(file: TextIO) -> bool:
    """Whether the file is a terminal, unless NO_COLOR or TERM=dumb is set."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Pen:
    """Writes text to a stream, coloured on a terminal and bare otherwise.

    Args:
        file: where to.
        colour: whether the reader is a terminal that shows colours.
    """

    def __init__(self, file: TextIO, colour: bool) -> None:
        self._file, self.colour = file, colour

    def step(self, text: str, tokens: int) -> None:
        """Write the text of one step that added so many tokens."""
        self._write(text, STEP_COLOURS.get(min(tokens, max(STEP_COLOURS)), ""))

    def aside(self, text: str) -> None:
        """Text that was not generated."""
        self._write(text, DIM)

    def note(self, text: str) -> None:
        """A line that the next note replaces; only a terminal sees it, and an empty one erases it."""
        if self.colour:
            self._put(f"{ERASE_LINE}{DIM}{text}{RESET}" if text else ERASE_LINE)

    def legend(self) -> None:
        """Say what the colours mean."""
        if self.colour:
            *fewer, most = [f"{code}{count}{RESET}" for count, code in STEP_COLOURS.items()]
            self._put(f"{DIM}tokens that came in one step:{RESET} 1 {' '.join(fewer)} {most} or more\n")

    def _write(self, text: str, code: str) -> None:
        if self.colour:
            text = text.replace("\x1b", "\u241b")  # a model must not steer the terminal
        self._put(f"{code}{text}{RESET}" if self.colour and code and text else text)

    def _put(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


class Shown(NamedTuple):
    """A text that was written.

    Attributes:
        text: all of it.
        output: the run that gave it.
        interruption: what cut it short, None if nothing did; for the caller to raise.
    """

    text: str
    output: GenerationOutput
    interruption: Interrupted | None


def show(
    run: Callable[[OnTokens], GenerationOutput],
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    pen: Pen,
    stream: bool = True,
) -> Shown:
    """Run a decoder and write its text, which may have been interrupted: as it comes, or at the end.

    Args:
        run: continues `ids`, calling back after every step.
        tokenizer: of the model.
        ids: the prompt.
        pen: writes.
        stream: whether to write after every step.
    """
    detokenizer, parts = Detokenizer(tokenizer, ids), list[str]()

    def on_tokens(tokens: list[int], step: int) -> None:
        parts.append(detokenizer.push(tokens))
        if stream:
            pen.step(parts[-1], len(tokens))

    interruption = None
    try:
        output = run(on_tokens)
    except Interrupted as error:
        output, interruption = error.output, error
    parts.append(detokenizer.flush())
    pen.step(parts[-1] if stream else "".join(parts), 1)
    pen.aside("\n")
    return Shown("".join(parts), output, interruption)


@contextlib.contextmanager
def on_rank_0(context: ParallelContext, file: TextIO) -> Iterator[TextIO]:
    """The file on rank 0, which alone prints, and nowhere on the others."""
    if context.is_main:
        yield file
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        yield nowhere
