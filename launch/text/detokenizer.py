"""Text of tokens, as they come: one by one, in steps or all at once, they give the same text.

It is what a UTF-8 decoder makes of the tokens' bytes: whole characters, and U+FFFD for bytes that are none.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from .decoder_steps import ESCAPE, Part, Step, decoder_steps, fed, finished, inside

CONTEXT = 16  # tokens of a prompt, at its beginning and its end, that the text behind it may depend on
UNFINISHED = "\ufffd"  # what decoding gives for the bytes of a character that is not complete
MOST_UNFINISHED = 3  # of them: a byte each


class TokenText(NamedTuple):
    """What a token adds to a text.

    Attributes:
        text: the characters that it completes.
        data: its own bytes.
    """

    text: str
    data: bytes


class NamedToken(NamedTuple):
    """A token of a text with its place there.

    Attributes:
        name: what it is called.
        data: its own bytes.
        offset: characters of the text before it, or before the one that it completes.
    """

    name: str
    data: bytes
    offset: int


class Vocabulary:
    """The tokens of a tokenizer, each by itself.

    Args:
        tokenizer: the model's tokenizer.

    Attributes:
        added: tokens by their names that are no words of the vocabulary, special ones among them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        self._make_steps = decoder_steps(tokenizer)
        self._steps = self._make_steps() if self._make_steps else None
        self._special = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._word: list[int] | None = None  # tokens that others come behind, where only texts can be decoded

    def special(self, token: int) -> str | None:
        """The name of a special token, which is no text; None of any other token."""
        return self._special.get(token)

    def piece(self, token: int) -> str | None:
        """A token as the vocabulary spells it; None for an id that the vocabulary lacks."""
        piece = self.tokenizer.convert_ids_to_tokens(token)
        return piece if isinstance(piece, str) else None

    def data(self, token: int) -> bytes | None:
        """The bytes that a token adds to a text that goes on; None where the tokenizer does not tell."""
        if self.special(token) is not None:
            return b""
        if self._steps is not None:
            piece = self.piece(token)
            return b"" if piece is None else inside(self._steps, piece).encode("utf-8", ESCAPE)
        if self._word is None:
            self._word = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        word, text = self._decoded(self._word), self._decoded([*self._word, token])
        text = text.removeprefix(word) if text.startswith(word) else self._decoded([token])
        return None if UNFINISHED in text else text.encode()

    def name(self, token: int) -> str:
        """What a token is called: the text that it adds, or its bytes where they are no text, as OpenAI writes them."""
        if special := self.special(token):
            return special
        data = self.data(token)
        return f"token_id:{token}" if data is None else name_of(data)

    def steps(self) -> list[Step] | None:
        """The steps that decode a text, at its beginning; None where only texts can be decoded."""
        return self._make_steps() if self._make_steps else None

    def _decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


class Detokenizer:
    """Decodes tokens as they come; what it has returned never changes.

    A character whose bytes are not complete waits for the others, or for the end of the text.

    Args:
        tokenizer: the model's tokenizer; or its vocabulary, which is made once where there are many texts.
        prompt: the tokens before the first new one.
        special: special tokens are text, too.

    Attributes:
        begun: there is some text, the prompt's included.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | Vocabulary, prompt: Sequence[int] = (), special: bool = False
    ) -> None:
        self.vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
        self._special = special
        self._steps = self.vocabulary.steps()
        self._window = None if self._steps is not None else _Window(self.vocabulary.tokenizer, special)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._wrote = False  # the text behind the prompt
        self.begun = False
        for token in self._told_by(prompt):
            self.add(token)
        self._wrote = False

    def push(self, tokens: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        return "".join(self.add(token).text for token in tokens)

    def add(self, token: int) -> TokenText:
        """Take one more token; what it adds to the text."""
        text = self._fed(token)
        self._wrote |= bool(text)
        self.begun |= bool(text)
        data = text.encode("utf-8", ESCAPE)
        return TokenText(self._characters.decode(data), data)

    @property
    def waiting(self) -> bytes:
        """Bytes of a character that is not complete."""
        return self._characters.getstate()[0]

    def flush(self) -> str:
        """Whatever is still held back; the text has ended."""
        rest = self._window.finish() if self._steps is None and self._window else finished(self._steps or [])
        if not (self._wrote or rest):
            return ""  # what waits is of the prompt
        return self._characters.decode(rest.encode("utf-8", ESCAPE), True)

    def _fed(self, token: int) -> str:
        if not self._is_text(token):
            return ""
        if self._window is not None:
            return self._window.add(token)
        piece = self.vocabulary.piece(token)
        return "" if piece is None else fed(self._steps or [], [Part(piece, True)])

    def _is_text(self, token: int) -> bool:
        return self._special or self.vocabulary.special(token) is None

    def _told_by(self, prompt: Sequence[int]) -> list[int]:
        """Tokens of a prompt that the text behind it depends on: the first ones that are text, and the last."""
        if len(prompt) <= 2 * CONTEXT:
            return [*prompt]
        first: list[int] = []
        for token in prompt[:-CONTEXT]:
            if len(first) == CONTEXT:
                break
            if self._is_text(token):
                first.append(token)
        return [*first, *prompt[-CONTEXT:]]


class _Window:
    """Text of a tokenizer that only decodes whole texts: what the last tokens say more with a new one than without.

    Where a new token changes what was said before, as some tokenizers take away a space, what was shown stays.

    Args:
        tokenizer: the model's tokenizer.
        special: special tokens are text, too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: bool) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._tokens: list[int] = []
        self._ends = [0]  # so many of them end with a character
        self._shown = ""

    def add(self, token: int) -> str:
        """Take one more token, and return the characters that it completes."""
        self._tokens.append(token)
        text = self._decoded()
        marks = len(text) - len(text.rstrip(UNFINISHED))
        finished = text[: len(text) - min(marks, MOST_UNFINISHED)]
        new = finished[len(self._shown) :]
        self._shown = max(self._shown, finished, key=len)
        if not marks:
            self._ends.append(len(self._tokens))
            if len(self._tokens) >= 2 * CONTEXT:  # a step costs the same however long the text
                self._forget()
        return new

    def finish(self) -> str:
        """The characters that were still held back."""
        return self._decoded()[len(self._shown) :]

    def _forget(self) -> None:
        dropped = max(end for end in self._ends if end <= CONTEXT)
        self._tokens = self._tokens[dropped:]
        self._ends = [end - dropped for end in self._ends if end >= dropped]
        self._shown = self._decoded()

    def _decoded(self) -> str:
        return str(
            self._tokenizer.decode(
                self._tokens, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
            )
        )


def decoded(
    tokenizer: PreTrainedTokenizerBase | Vocabulary,
    tokens: Sequence[int],
    behind: Sequence[int] = (),
    special: bool = False,
) -> str:
    """The text of tokens, all at once.

    Args:
        tokenizer: the model's tokenizer, or its vocabulary.
        tokens: token ids to decode.
        behind: the tokens before them.
        special: special tokens are text, too.
    """
    detokenizer = Detokenizer(tokenizer, behind, special)
    return detokenizer.push(tokens) + detokenizer.flush()


class TokenWalk:
    """The tokens of a text in their order: what each is called there, its bytes, and where it begins.

    A name is the text that a token adds. At the beginning of a text that is less than further on, where the tokenizer
    drops a space there.

    Args:
        vocabulary: the model's tokens.
        prompt: the tokens before the first one.
        offset: where that begins.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int] = (), offset: int = 0) -> None:
        self.vocabulary = vocabulary
        self.offset = offset
        self._detokenizer = Detokenizer(vocabulary, prompt)

    def add(self, token: int) -> NamedToken:
        """Take one more token; its name and bytes."""
        waiting = self._detokenizer.waiting
        text, data = self._detokenizer.add(token)
        begins = self.offset + (not _goes_on(waiting, data))
        self.offset += len(text)
        special = self.vocabulary.special(token)
        if special is None and (data or not self._detokenizer.begun):
            return NamedToken(name_of(data), data, begins)
        return NamedToken(special or self.vocabulary.name(token), data, begins)


def name_of(data: bytes) -> str:
    """A token's name by its bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _goes_on(waiting: bytes, data: bytes) -> bool:
    """Whether bytes belong to the character that waits for some; else that is none."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(waiting + data[:1])
    except UnicodeDecodeError:
        return not waiting
    return True
