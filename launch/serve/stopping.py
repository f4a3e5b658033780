"""Decodes a text while it is generated, and ends it at the client's stop strings, indentation or time limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ..text.decoder_steps import beginning_length
from ..text.detokenizer import Detokenizer, Vocabulary


class TextWatch:
    """Decodes a text's tokens, and ends the text at the client's stop strings and limits.

    Characters that may begin a stop string are held back until the text shows whether they do, as characters that were
    sent can't be taken back. A stop string may be the name of a special token, such as "<|im_end|>".

    Args:
        tokenizer: the model's tokenizer, or its `Vocabulary`.
        prompt: ids of the tokens before the text.
        stop: stop strings; the text ends before the first place at which one of them occurs.
        min_indent: number of characters; the text ends before a line that is indented by fewer, its first line
            excepted.
        time_limit_s: seconds after the first decode step at which the text ends, though never before its first line is
            complete. None: there is no limit.

    Attributes:
        ended: whether a stop string or a limit has ended the text.
        found: the stop string that ended the text; None if no stop string has.
        num_tokens: number of the text's tokens so far, including those of the stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | Vocabulary,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        min_indent: int = 0,
        time_limit_s: float | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stop = [each for string in stop for each in _spellings(string, self._detokenizer.vocabulary)]
        self._min_indent = min_indent
        self._time_limit_s = time_limit_s
        self._first_step: float | None = None
        self._held = _Held()
        self._line = ""  # the last one, as far as it was decoded
        self._lines = 0  # before it
        self._is_cut = False  # what comes behind is not of the text
        self.ended = False
        self.found: str | None = None
        self.num_tokens = 0
        self.num_thought = 0  # tokens of its reasoning, which is none: see `ReasoningWatch`

    def push(self, tokens: Sequence[int]) -> str:
        """Decode the tokens of the next decode step.

        Args:
            tokens: token ids that the step added.

        Returns:
            The characters that can be sent now: they are complete, and do not begin a stop string.
        """
        if not (self._stop or self._min_indent):
            self.num_tokens += len(tokens)
            new = self._take(self._detokenizer.push(tokens))
            self._look_at_clock()
            return new
        shown = ""
        for token in tokens:  # one by one, to know which of them ends it
            if self.ended:
                break
            self.num_tokens += 1
            shown += self._take(self._detokenizer.push([token]), self._detokenizer.vocabulary.special(token) or "")
        self._look_at_clock()
        return shown

    def thought(self) -> str:
        """Always "", as this class does not separate reasoning from the answer; `ReasoningWatch.thought` does."""
        return ""

    def flush(self) -> str:
        """The last characters, which were held back, once the text has ended; "" if a stop string has ended it."""
        if self._is_cut:
            return ""
        rest = self._take(self._detokenizer.flush())
        return rest + self._held.take()

    def _take(self, new: str, name: str = "") -> str:
        """Add characters, and the name of a token that has none; the characters that may be shown."""
        held = self._held
        held.add(new)
        held.add(name, shown=False)
        if not self._min_indent:
            self._lines += new.count("\n")
        elif (cut := self._shallow_line(new, held.text())) is not None:
            self.ended = self._is_cut = True
            return held.take()[:cut]
        found = [
            (held.place(place, stop.names), -len(stop.sought), stop.given)
            for stop in self._stop
            if (place := held.text(stop.names).find(stop.sought)) >= 0
        ]
        if found:
            place, _, self.found = min(found)
            self.ended = self._is_cut = True
            shown = held.take(place)
            held.take()
            return shown
        end = len(held.text(names=True))
        for stop in self._stop:
            text = held.text(stop.names)
            if begun := beginning_length(text, stop.sought):
                end = min(end, held.place(len(text) - begun, stop.names))
        if self._min_indent and self._lines and not self._line.strip():
            text = held.text()  # the line's own characters and the line's end
            end = min(end, held.place(max(len(text) - len(self._line) - 1, 0), names=False))
        return held.take(end)

    def _shallow_line(self, new: str, held: str) -> int | None:
        """Where in `held` a line ends behind which comes one that is indented too little; None for no such line."""
        for index, character in enumerate(new):
            if character == "\n":
                self._lines += 1
                self._line = ""
                continue
            self._line += character
            indent = len(self._line) - len(self._line.lstrip())
            first_word = not character.isspace() and len(self._line) == indent + 1
            if self._lines and first_word and indent < self._min_indent:
                start = len(held) - len(new) + index + 1 - len(self._line)
                return max(start - 1, 0)
        return None

    def _look_at_clock(self) -> None:
        now = time.perf_counter()
        if self._first_step is None:
            self._first_step = now
        limit = self._time_limit_s
        self.ended |= limit is not None and self._lines > 0 and now - self._first_step > limit


class _Stop(NamedTuple):
    """What ends a text.

    Attributes:
        sought: string that is looked for in the text.
        given: the stop string that it stands for.
        names: the text is one that has the names of special tokens.
    """

    sought: str
    given: str
    names: bool


class _Held:
    """Characters that wait, and among them names of special tokens, which are not shown."""

    def __init__(self) -> None:
        self._all = ""
        self._shown: list[int] = []  # places of the characters that are

    def add(self, text: str, shown: bool = True) -> None:
        """Add characters, or the name of a special token, which is not shown."""
        if shown:
            self._shown += range(len(self._all), len(self._all) + len(text))
        self._all += text

    def text(self, names: bool = False) -> str:
        """The characters, with names or without."""
        if names or len(self._shown) == len(self._all):
            return self._all
        return "".join(self._all[place] for place in self._shown)

    def place(self, index: int, names: bool) -> int:
        """Where a character of `text` is among all."""
        return index if names else [*self._shown, len(self._all)][index]

    def take(self, end: int | None = None) -> str:
        """The characters before a place, which wait no more; None for all."""
        end = len(self._all) if end is None else end
        taken = "".join(self._all[place] for place in self._shown if place < end)
        self._all = self._all[end:]
        self._shown = [place - end for place in self._shown if place >= end]
        return taken


def _spellings(stop: str, vocabulary: Vocabulary) -> list[_Stop]:
    """A stop string as it comes in a text: the name of an added token may be decoded to another one."""
    decoded = stop
    names = False
    for name, token in vocabulary.added.items():
        if name and name in stop:
            names |= vocabulary.special(token) is not None
            decoded = decoded.replace(name, (vocabulary.data(token) or b"").decode(errors="replace") or name)
    return [_Stop(sought, stop, names) for sought in dict.fromkeys([stop, decoded])]
