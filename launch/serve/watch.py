"""A text while it is generated: tokens become characters, and stop strings and limits of clients end it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..stream import Detokenizer


class TextWatch:
    """Decodes a text's tokens and decides whether its client wants more of them.

    What could be the beginning of a stop string is held back: characters that were given out stay.

    Args:
        tokenizer: of the model.
        prompt: token ids.
        stop: the text ends before the first of these strings.
        min_indent: the text ends before a line, other than its first, that is indented by less; 0 takes any line.
        time_limit_s: the text ends at the first step behind its first line that is later than this, counted from its
            first step; None is no limit.

    Attributes:
        ended: the client wants no more.
        found: the stop string that ended it.
        num_tokens: up to there.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        min_indent: int = 0,
        time_limit_s: float | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stop = [*stop]
        self._min_indent = min_indent
        self._time_limit_s = time_limit_s
        self._first_step: float | None = None
        self._held = ""
        self._line = ""  # the last one, as far as it was decoded
        self._lines = 0  # before it
        self.ended = False
        self.found: str | None = None
        self.num_tokens = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The characters that these tokens complete, as far as they are certain to stay."""
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
            shown += self._take(self._detokenizer.push([token]))
        self._look_at_clock()
        return shown

    def flush(self) -> str:
        """What was held back of a text that has ended."""
        if self.ended and (self.found is not None or self._min_indent):
            return ""
        rest = self._take(self._detokenizer.flush())
        rest, self._held = rest + self._held, ""
        return rest

    def _take(self, new: str) -> str:
        """Add characters; those that may be shown."""
        held = self._held + new
        if not self._min_indent:
            self._lines += new.count("\n")
        elif (cut := self._shallow_line(new, held)) is not None:
            self.ended = True
            self._held = ""
            return held[:cut]
        found = [(place, -len(stop), stop) for stop in self._stop if (place := held.find(stop)) >= 0]
        if found:
            place, _, self.found = min(found)
            self.ended = True
            self._held = ""
            return held[:place]
        kept = max((_overlap(held, stop) for stop in self._stop), default=0)
        if self._min_indent and self._lines and not self._line.strip():
            kept = max(kept, min(len(self._line) + 1, len(held)))  # the line's own characters and the line's end
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

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


def _overlap(text: str, stop: str) -> int:
    """The longest end of the text that is a beginning of the stop string, and not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
