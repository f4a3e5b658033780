"""Decodes tokens while they are generated; the text does not depend on how many tokens come at a time.

The text is the tokens' bytes decoded as UTF-8: whole characters, and U+FFFD for bytes that are no character.
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
    """The text and the bytes that one more token adds to a text.

    Attributes:
        text: the characters that the token completes; "" while bytes of a character are missing.
        data: the token's own bytes.
    """

    text: str
    data: bytes


class NamedToken(NamedTuple):
    """A token of a text, as OpenAI's interface reports it with log probabilities.

    Attributes:
        name: the text that the token adds, or "bytes:\\xe2\\x82" if its bytes are no whole characters.
        data: the token's own bytes.
        offset: number of characters that the text has before the token, or before the character that the token
            completes.
    """

    name: str
    data: bytes
    offset: int


class Vocabulary:
    """Gives the name, spelling and bytes of each token of a tokenizer, and decoder steps to decode texts with.

    Args:
        tokenizer: the model's tokenizer.

    Attributes:
        added: ids of the tokens that were added to the vocabulary, special ones among them, by the tokens' names.
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
        """The bytes that a token adds to a text; b"" for a special token.

        None if the tokenizer can only decode whole texts, and the token's bytes are no whole characters.

        Args:
            token: token id.
        """
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
        """A token's name in log probabilities, as in OpenAI's interface: the text that it adds inside a text.

        Special tokens have their own names, such as "<|im_end|>". A token whose bytes are no whole characters is named
        like "bytes:\\xe2", and one whose bytes are unknown like "token_id:123".

        Args:
            token: token id.
        """
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
    """Decodes the tokens of one text as they come; characters that it has returned never change.

    A character whose bytes are not complete is held back until its other bytes come, or the text ends.

    Args:
        tokenizer: the model's tokenizer, or its `Vocabulary`, made once for many texts.
        prompt: token ids before the text; they may decide, for example, whether the text begins with a space.
        special: whether the names of special tokens are part of the text.

    Attributes:
        begun: whether there is any text yet, including the prompt's.
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
        """Take the next tokens of the text, and return the characters that they complete.

        Args:
            tokens: the next token ids of the text.
        """
        return "".join(self.add(token).text for token in tokens)

    def add(self, token: int) -> TokenText:
        """Take the next token of the text, and return its bytes and the characters that it completes."""
        text = self._fed(token)
        self._wrote |= bool(text)
        self.begun |= bool(text)
        data = text.encode("utf-8", ESCAPE)
        return TokenText(self._characters.decode(data), data)

    @property
    def waiting(self) -> bytes:
        """Bytes of a character at the text's end that is not complete yet; b"" if there is none."""
        return self._characters.getstate()[0]

    def flush(self) -> str:
        """Return the text that was held back, once the last token has come; an incomplete character becomes U+FFFD."""
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
    after: Sequence[int] = (),
    special: bool = False,
) -> str:
    """Decode a complete list of tokens at once, and return the text.

    Args:
        tokenizer: the model's tokenizer, or its `Vocabulary`.
        tokens: token ids to decode.
        after: token ids before `tokens`, such as the prompt's, whose text is not returned.
        special: whether the names of special tokens are part of the text.
    """
    detokenizer = Detokenizer(tokenizer, after, special)
    return detokenizer.push(tokens) + detokenizer.flush()


class TokenWalk:
    """Walks through the tokens of a text, and gives each one's name, bytes and place for log probabilities.

    A token's name is the text that it adds at its place. If the tokenizer drops a text's first space, a token that is
    named " the" elsewhere is named "the" at the beginning of a text.

    Args:
        vocabulary: the model's tokens.
        prompt: token ids before the first token that is named.
        offset: the first named token's place: the number of characters before it.
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
    """The name of a token with these bytes: their text, or "bytes:\\xe2\\x82" if they are no whole characters."""
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
