"""Text of tokens while they are generated: fed one by one, in steps or all at once, they give one and the same text.

The text is what a UTF-8 decoder makes of the tokens' bytes: whole characters, and U+FFFD for bytes that are none.
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
    """The text that one more token adds.

    Attributes:
        text: the characters that the token completes; "" while the bytes of a character are missing.
        data: the token's own bytes.
    """

    text: str
    data: bytes


class NamedToken(NamedTuple):
    """A token of a text, as OpenAI's interface reports it with log probabilities.

    Attributes:
        name: the text that the token adds, or "bytes:\\xe2\\x82" where its bytes are no text.
        data: the token's own bytes.
        offset: characters of the text before the token, or before the character that it completes.
    """

    name: str
    data: bytes
    offset: int


class Vocabulary:
    """A tokenizer's tokens, each by itself: names, spellings and bytes; and steps that decode a text of them.

    Args:
        tokenizer: the model's tokenizer.

    Attributes:
        added: token ids by name of the tokens that were added to the vocabulary, special ones among them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        self._make_steps = decoder_steps(tokenizer)
        self._steps = self._make_steps() if self._make_steps else None
        self._special = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._word: list[int] | None = None  # tokens that others come behind, where only texts can be decoded

    def special(self, token: int) -> str | None:
        """The name of a special token, such as "<|im_end|>", which adds no text; None for any other token."""
        return self._special.get(token)

    def piece(self, token: int) -> str | None:
        """A token as the vocabulary spells it, such as "Ġthe"; None for an id that the vocabulary lacks."""
        piece = self.tokenizer.convert_ids_to_tokens(token)
        return piece if isinstance(piece, str) else None

    def data(self, token: int) -> bytes | None:
        """The bytes that a token adds to a text, b"" for a special one; None where decoded texts do not show them."""
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
        """A token's name, as OpenAI writes it: its text within a text, or "bytes:\\xe2" where it has none."""
        if special := self.special(token):
            return special
        data = self.data(token)
        return f"token_id:{token}" if data is None else name_of(data)

    def steps(self) -> list[Step] | None:
        """New decoder steps for one text, fed token by token; None if the tokenizer can only decode whole texts."""
        return self._make_steps() if self._make_steps else None

    def _decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


class Detokenizer:
    """Decodes one text's tokens as they come; characters that it has returned never change.

    A character whose bytes are not complete waits for more bytes, or for the end of the text.

    Args:
        tokenizer: the model's tokenizer; or its `Vocabulary`, made once for many texts.
        prompt: token ids before the first new one, on which e.g. a first space depends.
        special: whether special tokens are written, too.

    Attributes:
        begun: whether there is any text yet, the prompt's included.
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
        """The characters that these tokens complete.

        Args:
            tokens: the next token ids of the text.
        """
        return "".join(self.add(token).text for token in tokens)

    def add(self, token: int) -> TokenText:
        """Take the next token of the text: its bytes, and the characters that it completes."""
        text = self._fed(token)
        self._wrote |= bool(text)
        self.begun |= bool(text)
        data = text.encode("utf-8", ESCAPE)
        return TokenText(self._characters.decode(data), data)

    @property
    def waiting(self) -> bytes:
        """Bytes of the last character so far, while it is not complete; b"" if it is."""
        return self._characters.getstate()[0]

    def flush(self) -> str:
        """The text that was held back, when the text has ended: U+FFFD for an incomplete character."""
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
        """Tokens of a prompt that suffice to decode the text behind it: the first ones with text, and the last ones."""
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
    """Text as it comes from a tokenizer that only decodes whole texts: it decodes the last tokens with each new one.

    Where a new token changes earlier characters, as some tokenizers take away a space, what was returned stays.

    Args:
        tokenizer: the model's tokenizer.
        special: whether special tokens are written, too.
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
    """The text of tokens that are all there.

    Args:
        tokenizer: the model's tokenizer, or its `Vocabulary`.
        tokens: token ids to decode.
        behind: token ids before them, whose text is not returned.
        special: whether special tokens are written, too.
    """
    detokenizer = Detokenizer(tokenizer, behind, special)
    return detokenizer.push(tokens) + detokenizer.flush()


class TokenWalk:
    """Names the tokens of a text one by one, with their bytes and places, as log probabilities are reported.

    A name is the text that a token adds: "the" at the beginning of a text may be " the" further on, where the tokenizer
    drops a text's first space.

    Args:
        vocabulary: the model's tokens.
        prompt: token ids before the first one that is named.
        offset: characters before the first token that is named, where offsets begin.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int] = (), offset: int = 0) -> None:
        self.vocabulary = vocabulary
        self.offset = offset
        self._detokenizer = Detokenizer(vocabulary, prompt)

    def add(self, token: int) -> NamedToken:
        """Take the next token of the text, and return its name, bytes and place."""
        waiting = self._detokenizer.waiting
        text, data = self._detokenizer.add(token)
        begins = self.offset + (not _goes_on(waiting, data))
        self.offset += len(text)
        special = self.vocabulary.special(token)
        if special is None and (data or not self._detokenizer.begun):
            return NamedToken(name_of(data), data, begins)
        return NamedToken(special or self.vocabulary.name(token), data, begins)


def name_of(data: bytes) -> str:
    """The name of a token with these bytes: their text, or "bytes:\\xe2\\x82" if they are no text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _goes_on(waiting: bytes, data: bytes) -> bool:
    """Whether bytes belong to the character that waits for more; if they don't, that one is broken."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(waiting + data[:1])
    except UnicodeDecodeError:
        return not waiting
    return True
