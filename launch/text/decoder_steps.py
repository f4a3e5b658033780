"""The decoders of the `tokenizers` library, fed token by token.

There a decoder makes a text of all tokens at once: a chain of steps, each of which takes a list of strings and gives
another. Here each step takes one string after the other, and gives what no later one can change. The strings are called
units; a unit may come in several parts, as one into which a step before has fused all others.

Bytes that are no character yet, or no character at all, are lone surrogates (Python's `surrogateescape`), so that bytes
which several tokens have of one character come together at the end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tokenizers import Regex, decoders
from transformers import PreTrainedTokenizerBase

ESCAPE = "surrogateescape"
BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")
CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _byte_alphabet() -> dict[str, int]:
    """The byte that a character stands for in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class Part(NamedTuple):
    """A part of a unit.

    Attributes:
        text: its characters.
        begins: it is the first of its unit.
    """

    text: str
    begins: bool


Parts = list[Part]


class Step:
    """A step of a decoder; this one changes nothing.

    Attributes:
        index: number of the unit that the last part belongs to, from 0; -1 before the first.
    """

    def __init__(self) -> None:
        self.index = -1

    def feed(self, part: Part) -> Parts:
        """What a part becomes, as far as it is certain."""
        self.index += part.begins
        return [Part(self.inside(part.text) if self.index else self.first(part.text), part.begins)]

    def finish(self) -> Parts:
        """What is left when the last part has come."""
        return []

    def inside(self, text: str) -> str:
        """What a token becomes that others come before and behind."""
        return text

    def first(self, text: str) -> str:
        """What the first unit of a text becomes."""
        return self.inside(text)


class WholeUnits(Step):
    """A step that looks at whole units: where they come in parts, it waits for the end of each.

    Args:
        in_parts: units may come in several.
    """

    def __init__(self, in_parts: bool) -> None:
        super().__init__()
        self._in_parts = in_parts
        self._held: str | None = None

    def feed(self, part: Part) -> Parts:
        if not self._in_parts:
            return self._made(part.text)
        made: Parts = []
        if part.begins and self._held is not None:
            made = self._made(self._held)
            self._held = ""
        self._held = (self._held or "") + part.text
        return made

    def finish(self) -> Parts:
        held, self._held = self._held, None
        return [] if held is None else self._made(held)

    def _made(self, text: str) -> Parts:
        self.index += 1
        return self.of_unit(text)

    def of_unit(self, text: str) -> Parts:
        """The characters that a unit becomes, by its place in the text."""
        return [Part(self.inside(text) if self.index else self.first(text), True)]


class Joined(Step):
    """No decoder at all: a space between tokens."""

    def feed(self, part: Part) -> Parts:
        self.index += part.begins
        return [Part(" " * (part.begins and self.index > 0) + part.text, part.begins)]

    def inside(self, text: str) -> str:
        return " " + text


class ByteLevel(WholeUnits):
    """A character for every byte, as GPT-2 has them. All units become one."""

    def of_unit(self, text: str) -> Parts:
        return [Part(self.inside(text), not self.index)]

    def inside(self, text: str) -> str:
        try:
            data = bytes([BYTE_OF[character] for character in text])
        except KeyError:  # an added token, which is written as it is
            return text
        return data.decode("ascii", ESCAPE)


class ByteFallback(Step):
    """Tokens such as <0xE4> stand for bytes. Those that follow each other become one unit.

    Args:
        in_parts: units may come in several parts, none of which is such a token.
    """

    def __init__(self, in_parts: bool) -> None:
        super().__init__()
        self._in_parts = in_parts
        self._behind_byte = False

    def feed(self, part: Part) -> Parts:
        found = None if self._in_parts else BYTE_TOKEN.fullmatch(part.text)
        begins = part.begins and not (found and self._behind_byte)
        self._behind_byte = found is not None
        return [Part(self.inside(part.text) if found else part.text, begins)]

    def inside(self, text: str) -> str:
        found = BYTE_TOKEN.fullmatch(text)
        return bytes.fromhex(found[1]).decode("ascii", ESCAPE) if found else text


class Characters(Step):
    """Bytes that make characters become these, for steps that look for some beyond ASCII."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder = codecs.getincrementaldecoder("utf-8")(ESCAPE)

    def feed(self, part: Part) -> Parts:
        rest = self.finish() if part.begins else []
        return [*rest, Part(self._decoder.decode(part.text.encode("utf-8", ESCAPE)), part.begins)]

    def finish(self) -> Parts:
        rest = self._decoder.decode(b"", True)
        return [Part(rest, False)] if rest else []


class Metaspace(Step):
    """A character stands for the space, but in the first unit of a text, where it stands for nothing.

    Args:
        replacement: the character.
        prepends: the first unit is such a one.
    """

    def __init__(self, replacement: str, prepends: bool) -> None:
        super().__init__()
        self._replacement = replacement
        self._prepends = prepends

    def inside(self, text: str) -> str:
        return text.replace(self._replacement, " ")

    def first(self, text: str) -> str:
        return text.replace(self._replacement, "" if self._prepends else " ")


class Fuse(Step):
    """All units become one."""

    def feed(self, part: Part) -> Parts:
        self.index += part.begins
        return [Part(part.text, part.begins and not self.index)]


class Strip(Step):
    """A character is taken away from the start and the end of every unit.

    Args:
        content: the character.
        start, stop: most characters that are taken away there.
        in_parts: units are whole texts, or runs of bytes, which come in several parts.
    """

    def __init__(self, content: str, start: int, stop: int, in_parts: bool) -> None:
        super().__init__()
        self._content = content
        self._start, self._stop, self._in_parts = start, stop, in_parts
        self._to_cut = 0
        self._held = ""  # that may be the end

    def feed(self, part: Part) -> Parts:
        if part.begins:
            self._held, self._to_cut = "", self._start  # what was held is the end of the unit before
        text = self._held + part.text
        if self._to_cut and text:
            left = text.lstrip(self._content)
            cut = min(len(text) - len(left), self._to_cut)
            self._to_cut = self._to_cut - cut if cut == len(text) else 0
            text = text[cut:]
        end = min(len(text) - len(text.rstrip(self._content)), self._stop)
        self._held = text[len(text) - end :]
        return [Part(text[: len(text) - end], part.begins)]

    def inside(self, text: str) -> str:
        if self._in_parts:
            return text
        alone = Strip(self._content, self._start, self._stop, False)
        return alone.feed(Part(text, True))[0].text


class Replace(Step):
    """A string is replaced by another one.

    Args:
        pattern: string that is looked for in each unit, not empty.
        content: stands in its place.
        in_parts: units may come in several, and the pattern with them.
    """

    def __init__(self, pattern: str, content: str, in_parts: bool) -> None:
        super().__init__()
        self._pattern, self._content, self._in_parts = pattern, content, in_parts
        self._held = ""  # that may begin the pattern

    def feed(self, part: Part) -> Parts:
        if not self._in_parts:
            return [Part(self.inside(part.text), True)]
        rest = self.finish() if part.begins else []
        *done, text = (self._held + part.text).split(self._pattern)
        kept = beginning_length(text, self._pattern)
        self._held = text[len(text) - kept :]
        return [*rest, Part(self._content.join([*done, text[: len(text) - kept]]), part.begins)]

    def finish(self) -> Parts:
        rest, self._held = self._held, ""
        return [Part(rest, False)] if rest else []

    def inside(self, text: str) -> str:
        return text.replace(self._pattern, self._content)


class WholeReplace(WholeUnits):
    """What a regular expression finds is replaced.

    Args:
        decoder: the library's.
        in_parts: see `WholeUnits`; a fused text is held back until its end.
    """

    def __init__(self, decoder: decoders.Replace, in_parts: bool) -> None:
        super().__init__(in_parts)
        self._decoder = decoder

    def inside(self, text: str) -> str:
        return self._decoder.decode([text.encode("utf-8", ESCAPE).decode("utf-8", "replace")])


class WordPiece(WholeUnits):
    """A space before every token, but those that go on with a word.

    Args:
        prefix: what tokens that go on with a word begin with.
        cleanup: no space before a full stop, and the like.
        in_parts: see `WholeUnits`.
    """

    def __init__(self, prefix: str, cleanup: bool, in_parts: bool) -> None:
        super().__init__(in_parts)
        self._prefix, self._cleanup = prefix, cleanup

    def inside(self, text: str) -> str:
        return self.first(text.removeprefix(self._prefix) if text.startswith(self._prefix) else " " + text)

    def first(self, text: str) -> str:
        return cleaned(text) if self._cleanup else text


class WordEnds(WholeUnits):
    """A suffix of tokens that end a word, which stands for a space, but at the end of the text.

    Args:
        suffix: the suffix, as the BPE of GPT-1 has it.
        in_parts: see `WholeUnits`.
    """

    def __init__(self, suffix: str, in_parts: bool) -> None:
        super().__init__(in_parts)
        self._suffix = suffix
        self._space = ""  # the rest of the last token if another one follows
        self._end = ""  # the rest if none does

    def of_unit(self, text: str) -> Parts:
        space, end = self.inside(text), text.replace(self._suffix, "")
        same = next((i for i, (a, b) in enumerate(zip(space, end, strict=False)) if a != b), min(len(space), len(end)))
        rest = [Part(self._space, False)] if self._space else []
        self._space, self._end = space[same:], end[same:]
        return [*rest, Part(space[:same], True)]

    def finish(self) -> Parts:
        made = super().finish()
        rest, self._space, self._end = self._end, "", ""
        return [*made, Part(rest, False)] if rest else made

    def inside(self, text: str) -> str:
        return text.replace(self._suffix, " ")


class Ctc(WholeUnits):
    """Tokens that come twice in a row count once.

    Args:
        pad: a token that stands for no text.
        delimiter: what is between words.
        cleanup: see `WordPiece`; only then the delimiter is a space.
        in_parts: see `WholeUnits`.
    """

    def __init__(self, pad: str, delimiter: str, cleanup: bool, in_parts: bool) -> None:
        super().__init__(in_parts)
        self._pad, self._delimiter, self._cleanup = pad, delimiter, cleanup
        self._last: str | None = None

    def of_unit(self, text: str) -> Parts:
        again, self._last = text == self._last, text
        made = "" if again else self.inside(text)
        return [Part(made, True)] if made else []

    def inside(self, text: str) -> str:
        text = text.replace(self._pad, "")
        return cleaned(text).replace(self._delimiter, " ") if self._cleanup else text


Steps = Callable[[], list[Step]]


def decoder_steps(tokenizer: PreTrainedTokenizerBase) -> Steps | None:
    """Makes the steps of a tokenizer's decoder, at the beginning of a text.

    Returns:
        None where the tokenizer is not one of the library's, decodes in a way of its own, or has a decoder of a type
        that is not known here.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or _decodes_itself(tokenizer):
        return None
    if backend.decoder is None:
        return lambda: [Joined()]
    try:
        state = json.loads(backend.decoder.__getstate__())
        made = _Chain()
        made.add(state)
    except Exception:  # one that is written in Python has no state
        return None
    return lambda: [make() for make in made.steps]


class _Chain:
    """The steps of a decoder, as they are read from its state.

    Attributes:
        steps: make them.
    """

    def __init__(self) -> None:
        self.steps: list[Callable[[], Step]] = []
        self._in_parts = False  # units come in parts
        self._has_bytes = False  # that are no characters yet

    def add(self, state: dict[str, Any]) -> None:
        """A decoder; KeyError for one of an unknown type, or with other settings."""
        in_parts = self._in_parts
        match state["type"]:
            case "Sequence":
                for each in state["decoders"]:
                    self.add(each)
            case "ByteLevel":
                self._looks()
                self.steps.append(lambda: ByteLevel(in_parts))
                self._in_parts = self._has_bytes = True
            case "ByteFallback":
                self.steps.append(lambda: ByteFallback(in_parts))
                self._in_parts = self._has_bytes = True
            case "Fuse":
                self.steps.append(Fuse)
                self._in_parts = True
            case "Metaspace":
                replacement, prepends = state["replacement"], state["prepend_scheme"] != "never"
                self._looks(replacement)
                self.steps.append(lambda: Metaspace(replacement, prepends))
            case "Strip":
                content, start, stop = state["content"], state["start"], state["stop"]
                self._looks(content)
                self.steps.append(lambda: Strip(content, start, stop, in_parts))
            case "Replace":
                self._replace(state["pattern"], state["content"], in_parts)
            case "WordPiece":
                prefix, cleanup = state["prefix"], state["cleanup"]
                self._looks()
                self.steps.append(lambda: WordPiece(prefix, cleanup, in_parts))
                self._in_parts = False
            case "BPEDecoder":
                suffix = state["suffix"]
                self._looks()
                self.steps.append(lambda: WordEnds(suffix, in_parts))
                self._in_parts = True
            case "CTC":
                pad, delimiter, cleanup = state["pad_token"], state["word_delimiter_token"], state["cleanup"]
                self._looks()
                self.steps.append(lambda: Ctc(pad, delimiter, cleanup, in_parts))
                self._in_parts = False
            case _:
                raise KeyError(state["type"])

    def _replace(self, pattern: dict[str, str], content: str, in_parts: bool) -> None:
        found = pattern.get("String")
        if found:
            self._looks(found)
            self.steps.append(lambda: Replace(found, content, in_parts))
            return
        decoder = decoders.Replace(Regex(pattern["Regex"]) if found is None else found, content)
        self._looks()
        self.steps.append(lambda: WholeReplace(decoder, in_parts))
        self._in_parts = False

    def _looks(self, for_text: str | None = None) -> None:
        """A step follows that looks for a text, or for any."""
        if self._has_bytes and not (for_text and for_text.isascii()):
            self.steps.append(Characters)
            self._has_bytes = False


def fed(steps: Sequence[Step], parts: Parts) -> str:
    """What comes out behind the last step when these parts go into the first."""
    for step in steps:
        parts = [made for part in parts for made in step.feed(part)]
    return "".join(part.text for part in parts)


def finished(steps: Sequence[Step]) -> str:
    """What comes out when the text has ended."""
    text = ""
    for place, step in enumerate(steps):
        text += fed(steps[place + 1 :], step.finish())
    return text


def inside(steps: Sequence[Step], text: str) -> str:
    """What a token becomes that others come before and behind."""
    for step in steps:
        text = step.inside(text)
    return text


def beginning_length(text: str, sought: str) -> int:
    """Characters of the longest end of the text that begins what is sought, and is not all of it."""
    for length in range(min(len(text), len(sought) - 1), 0, -1):
        if text.endswith(sought[:length]):
            return length
    return 0


def cleaned(text: str) -> str:
    """A text without the spaces that English has not."""
    for dirty, clean in CLEAN_UP:
        text = text.replace(dirty, clean)
    return text


def _decodes_itself(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its class decodes in another way than most."""
    from transformers import PreTrainedTokenizerFast

    usual = PreTrainedTokenizerFast
    return any(getattr(type(tokenizer), name) is not getattr(usual, name) for name in ("_decode", "decode"))
