"""Writes generated text as it comes, in colours that show how many tokens each decode step added."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO

from transformers import PreTrainedTokenizerBase

from lp.engine.interrupts import Interrupted
from lp.engine.output import GenerationOutput
from lp.engine.request import OnTokens
from lp.waits import waiting

from .detokenizer import Detokenizer

FIRST = "first tokens; the first text on a machine also compiles what it needs"
ALL = "the whole text, which stream=true would show as it comes"
RESET, DIM = "\x1b[0m", "\x1b[2m"
STEP_COLOURS = {2: "\x1b[36m", 3: "\x1b[32m", 4: "\x1b[33m", 5: "\x1b[35m"}  # by the tokens of a step, 5 and more alike


def shows_colours(file: TextIO) -> bool:
    """Whether to write colours to a file: it is a terminal, and neither NO_COLOR nor TERM=dumb is set."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Pen:
    """Writes generated text and remarks about it, in colours on a terminal and without colours elsewhere.

    Args:
        file: file for the generated text.
        colour: whether `file` is a terminal that shows colours.
        aside: file for the remarks; None: they go to `file`, too.
    """

    def __init__(self, file: TextIO, colour: bool, aside: TextIO | None = None) -> None:
        self._file, self.colour = file, colour
        self._aside = file if aside is None else aside
        self._dims = colour if aside is None or aside is file else shows_colours(aside)

    def step(self, text: str, tokens: int) -> None:
        """Write the text of one decode step, in the colour for its number of tokens.

        Args:
            text: the characters that the step completed.
            tokens: how many tokens the step added.
        """
        self._write(self._file, text, STEP_COLOURS.get(min(tokens, max(STEP_COLOURS)), ""), self.colour)

    def aside(self, text: str) -> None:
        """Write a remark, which is not part of the generated text; dimmed on a terminal."""
        self._write(self._aside, text, DIM, self._dims)

    def legend(self) -> None:
        """Write a line that says which colour stands for how many tokens a step; nothing is written without colours."""
        if self.colour:
            *fewer, most = [f"{code}{count}{RESET}" for count, code in STEP_COLOURS.items()]
            legend = f"tokens that came in one step:{RESET} 1 {' '.join(fewer)} {most} or more\n"
            _put(self._aside, f"{DIM}{legend}")

    def _write(self, file: TextIO, text: str, code: str, colour: bool) -> None:
        if colour:
            text = text.replace("\x1b", "\u241b")  # a model must not steer the terminal
        _put(file, f"{code}{text}{RESET}" if colour and code and text else text)


def _put(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()


class Shown(NamedTuple):
    """A generated text that `show` has written.

    Attributes:
        text: the whole text.
        output: the decoder's result, or what it had generated when it was interrupted.
        interruption: the exception that cut the text short, which the caller should raise; None: there was none.
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
    before: Callable[[], object] | None = None,
) -> Shown:
    """Run a decoder and write its text, either as it comes or at its end; an interrupted text is written, too.

    Args:
        run: generates the text. It gets a function, which it calls with the new tokens after every decode step.
        tokenizer: the model's tokenizer.
        ids: token ids of the prompt.
        pen: writes the text.
        stream: whether to write after every decode step. If False, all is written at the end.
        before: called once, just before the first text is written, to write something before it. Until then a line may
            show what the program is waiting for.
    """
    detokenizer, parts = Detokenizer(tokenizer, ids), list[str]()
    unwritten = contextlib.ExitStack()
    if before:
        unwritten.callback(before)
    unwritten.enter_context(waiting(FIRST if stream else ALL))

    def on_tokens(tokens: list[int], step: int) -> None:
        if stream:
            unwritten.close()
        parts.append(detokenizer.push(tokens))
        if stream:
            pen.step(parts[-1], len(tokens))

    interruption = None
    with unwritten:
        try:
            output = run(on_tokens)
        except Interrupted as error:
            output, interruption = error.output, error
    parts.append(detokenizer.flush())
    pen.step(parts[-1] if stream else "".join(parts), 1)
    pen.step("\n", 1)
    return Shown("".join(parts), output, interruption)
