"""The decoders of the `tokenizers` library, fed token by token, for text that is shown while it is generated.

A decoder of the library gets all tokens at once. It is a chain of stages, called decoder steps here, and each turns a
list of strings into another list. The classes here take the strings one after the other instead, and return the text
that no later string can change. The strings are called units; the first step's units are tokens. A unit may come in
several parts, for example after a step that joins all units into one.

Bytes that are no character yet, or no character at all, are lone surrogates (Python's `surrogateescape`). The bytes of
one character thus come together at the end, whichever tokens they are from.
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
    """The byte that each character of a byte-level vocabulary (GPT-2's) stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class Part(NamedTuple):
    """A part of a unit, which is a token, or a string that an earlier decoder step made of tokens.

    Attributes:
        text: characters of the part.
        begins: whether this is the first part of its unit.
    """

    text: str
    begins: bool


Parts = list[Part]


class Step:
    """A decoder step: a stage of decoding tokens to text, fed part by part. This base class changes nothing.

    Attributes:
        index: number of the unit (token, or string from an earlier step) that is being fed, from 0; -1 before the
            first.
    """

    def __init__(self) -> None:
        self.index = -1

    def feed(self, part: Part) -> Parts:
        """Take the next part of a token or string, and return the parts of the result that nothing later can change."""
        self.index += part.begins
        return [Part(self.inside(part.text) if self.index else self.first(part.text), part.begins)]

    def finish(self) -> Parts:
        """Return the parts of the result that were held back; called after the last token."""
        return []

    def inside(self, text: str) -> str:
        """Convert one token as if it were in the middle of a text, with other tokens before and after it.

        This is used to find the text of a single token.

        Args:
            text: the token, as the vocabulary or the step before this one spells it.
        """
        return text

    def first(self, text: str) -> str:
        """Convert the first token of a text; some decoders drop a space there.

        Args:
            text: the token, as the vocabulary or the step before this one spells it.
        """
        return self.inside(text)


class WholeUnits(Step):
    """Base class of decoder steps that convert whole units (tokens or strings): it joins a unit's parts first.

    Args:
        in_parts: whether units come in several parts, because an earlier step joins tokens.
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
        """Convert a whole unit, and return the parts of the result.

        Args:
            text: characters of the unit; `index` is its number.
        """
        return [Part(self.inside(text) if self.index else self.first(text), True)]


class Joined(Step):
    """The decoder step for a tokenizer without a decoder: it joins the tokens with spaces."""

    def feed(self, part: Part) -> Parts:
        self.index += part.begins
        return [Part(" " * (part.begins and self.index > 0) + part.text, part.begins)]

    def inside(self, text: str) -> str:
        return " " + text


class ByteLevel(WholeUnits):
    """Decodes byte-level tokens, as GPT-2 has them: each character stands for a byte.

    All tokens of a text are joined into one string.
    """

    def of_unit(self, text: str) -> Parts:
        return [Part(self.inside(text), not self.index)]

    def inside(self, text: str) -> str:
        try:
            data = bytes([BYTE_OF[character] for character in text])
        except KeyError:  # an added token, which is written as it is
            return text
        return data.decode("ascii", ESCAPE)


class ByteFallback(Step):
    """Decodes tokens that stand for one byte, such as <0xE4>; successive ones are joined into one unit (string).

    Args:
        in_parts: whether units come in several parts, because an earlier step joins tokens; then no unit is such a
            token.
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
    """Joins bytes into characters as soon as these are complete.

    It comes before decoder steps that look for non-ASCII characters.
    """

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
    """Replaces the character that SentencePiece's tokens have for a space, such as "▁", by a space.

    Args:
        replacement: the character that stands for a space.
        prepends: whether the tokenizer puts this character before a text; it is then dropped from the first token.
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
    """Joins all tokens into one string, so that later decoder steps see the text as a whole."""

    def feed(self, part: Part) -> Parts:
        self.index += part.begins
        return [Part(part.text, part.begins and not self.index)]


class Strip(Step):
    """Removes a character from the start and the end of every unit (a token, or a string from an earlier step).

    Args:
        content: the character.
        start, stop: how many copies of the character are removed at most, at the start and at the end.
        in_parts: whether units come in several parts, because an earlier step joins tokens or bytes.
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
    """Replaces one string by another in every unit (a token, or a string from an earlier step).

    Args:
        pattern: the string to replace, not empty.
        content: the string that replaces it.
        in_parts: whether units come in several parts, so that `pattern` may begin in one part and end in another.
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
    """Replaces the matches of a regular expression in every unit (a token, or a string from an earlier step).

    Args:
        decoder: the library's decoder, which replaces the matches.
        in_parts: whether units come in several parts; a unit is then held back until its last part.
    """

    def __init__(self, decoder: decoders.Replace, in_parts: bool) -> None:
        super().__init__(in_parts)
        self._decoder = decoder

    def inside(self, text: str) -> str:
        return self._decoder.decode([text.encode("utf-8", ESCAPE).decode("utf-8", "replace")])


class WordPiece(WholeUnits):
    """Puts a space before tokens that begin a word, but not before tokens that continue one, as BERT's decoder does.

    Args:
        prefix: prefix of tokens that continue a word, such as "##".
        cleanup: whether to remove spaces before full stops and the like.
        in_parts: whether tokens come in several parts, because an earlier step joins them.
    """

    def __init__(self, prefix: str, cleanup: bool, in_parts: bool) -> None:
        super().__init__(in_parts)
        self._prefix, self._cleanup = prefix, cleanup

    def inside(self, text: str) -> str:
        return self.first(text.removeprefix(self._prefix) if text.startswith(self._prefix) else " " + text)

    def first(self, text: str) -> str:
        return cleaned(text) if self._cleanup else text


class WordEnds(WholeUnits):
    """Replaces the suffix of tokens that end a word by a space, or by nothing at the end of the text, as for GPT-1.

    Args:
        suffix: the suffix, such as "</w>".
        in_parts: whether tokens come in several parts, because an earlier step joins them.
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
    """Decodes the tokens of a CTC model: a token that comes several times in a row counts once.

    Args:
        pad: the token that stands for no text.
        delimiter: the token between words.
        cleanup: whether to replace the delimiter by a space, and to remove spaces before full stops and the like.
        in_parts: whether tokens come in several parts, because an earlier step joins them.
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
    """Translate a tokenizer's own decoder to decoder steps, which can be fed token by token.

    Args:
        tokenizer: the model's tokenizer.

    Returns:
        A function that makes new steps for a text. None if the tokenizer is not one of the `tokenizers` library,
        decodes in its own way, or has a decoder of an unknown type; then only whole texts can be decoded.
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
    """Reads a decoder's steps from the state that the library saves of it.

    Attributes:
        steps: functions that make each step, in order.
    """

    def __init__(self) -> None:
        self.steps: list[Callable[[], Step]] = []
        self._in_parts = False  # units come in parts
        self._has_bytes = False  # that are no characters yet

    def add(self, state: dict[str, Any]) -> None:
        """Add the steps of a decoder; KeyError if its type or a setting is unknown."""
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
        """Note that the next step looks for a text, or for any (None): bytes become characters before it."""
        if self._has_bytes and not (for_text and for_text.isascii()):
            self.steps.append(Characters)
            self._has_bytes = False


def fed(steps: Sequence[Step], parts: Parts) -> str:
    """Feed parts of tokens to a chain of decoder steps, and return the text that comes out of the last step.

    Args:
        steps: the steps, which hold back text that later tokens may change.
        parts: parts of the next tokens.
    """
    for step in steps:
        parts = [made for part in parts for made in step.feed(part)]
    return "".join(part.text for part in parts)


def finished(steps: Sequence[Step]) -> str:
    """Return the text that a chain of decoder steps has held back; call it after the last token.

    Args:
        steps: the decoder steps.
    """
    text = ""
    for place, step in enumerate(steps):
        text += fed(steps[place + 1 :], step.finish())
    return text


def inside(steps: Sequence[Step], text: str) -> str:
    """Decode one token as if it were in the middle of a text, with other tokens before and after it.

    Args:
        steps: the decoder steps; they are not changed.
        text: the token as the vocabulary spells it.
    """
    for step in steps:
        text = step.inside(text)
    return text


def beginning_length(text: str, sought: str) -> int:
    """How many characters at a text's end may begin a sought string, and are held back until more text comes.

    Args:
        text: the text so far, such as "one </".
        sought: the string to look for. With "</w>" the result is 2, for "</".
    """
    for length in range(min(len(text), len(sought) - 1), 0, -1):
        if text.endswith(sought[:length]):
            return length
    return 0


def cleaned(text: str) -> str:
    """Remove spaces before full stops and the like from a text, as transformers' clean_up_tokenization_spaces does."""
    for dirty, clean in CLEAN_UP:
        text = text.replace(dirty, clean)
    return text


def _decodes_itself(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's class has a way to decode of its own."""
    from transformers import PreTrainedTokenizerFast

    usual = PreTrainedTokenizerFast
    return any(getattr(type(tokenizer), name) is not getattr(usual, name) for name in ("_decode", "decode"))
