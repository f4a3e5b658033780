"""Encodes chat messages so that only the chat template can write special tokens.

Otherwise a user's message that contains `<|im_end|>` would end the user's turn, and could begin a system message.
"""

from __future__ import annotations

import copy
import re
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lp.errors import UserError


class LiteralCopy:
    """A copy of a tokenizer that encodes special tokens as plain text, for users' texts; made at the first use.

    A tokenizer keeps this choice as a state, which a call with `split_special_tokens` changes. With only one tokenizer,
    threads would change it for each other.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._copy: PreTrainedTokenizerBase | None = None
        self._lock = threading.Lock()

    def get(self) -> PreTrainedTokenizerBase:
        """Return the copy, which the first call makes.

        Raises:
            ValueError: this tokenizer can't be copied.
        """
        with self._lock:
            if self._copy is None:
                try:
                    literal = copy.deepcopy(self._tokenizer)
                except Exception as error:  # the tokenizers library has no class for it
                    raise UserError(
                        f"a text has a special token, which this tokenizer can't take as text ({error}); leave it out"
                    ) from error
                literal("x", split_special_tokens=True)
                self._copy = literal
            return self._copy


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Any],
    literal: LiteralCopy | None = None,
    /,
    **given: Any,
) -> list[int]:
    """Apply the model's chat template to messages, and encode the prompt up to where the answer begins.

    Special tokens that the messages contain are encoded as plain text.

    Args:
        tokenizer: the model's tokenizer.
        messages: messages as `apply_chat_template` takes them.
        literal: the tokenizer's copy for plain text, needed if several threads encode; None: the tokenizer itself is
            used.
        given: more arguments for `apply_chat_template`.

    Raises:
        ValueError: a message has a special token that the tokenizer can't encode as plain text.
        Exception: the template refuses the messages.
    """
    hidden = HiddenTokens(tokenizer, literal)
    text = tokenizer.apply_chat_template(
        hidden.hide([*messages]), add_generation_prompt=True, tokenize=False, **hidden.hide(given)
    )
    return hidden.encode(str(text))


def text_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, literal: LiteralCopy | None = None, **given: Any
) -> list[int]:
    """Encode a user's text, with special tokens in it as plain text, and return its token ids.

    The tokenizer still adds its own special tokens, such as BOS, around the text.

    Args:
        tokenizer: the model's tokenizer.
        text: the user's text.
        literal: the tokenizer's copy for plain text, needed if several threads encode; None: the tokenizer itself is
            used.
        given: more arguments for the tokenizer's call.

    Raises:
        ValueError: the text has a special token that the tokenizer can't encode as plain text.
    """
    if not HiddenTokens(tokenizer).found(text):
        return list(tokenizer(text, verbose=False, **given)["input_ids"])
    return _literal_tokens(tokenizer, literal, text, **given)


def _literal_tokens(
    tokenizer: PreTrainedTokenizerBase, literal: LiteralCopy | None, text: str, **given: Any
) -> list[int]:
    """Token ids of a text, with special tokens in it encoded as plain text."""
    takes_as_text = tokenizer if literal is None else literal.get()
    return list(takes_as_text(text, split_special_tokens=True, verbose=False, **given)["input_ids"])


class HiddenTokens:
    """Hides special tokens in users' texts from a chat template, and encodes them as plain text afterwards.

    `hide` replaces the tokens by marks. `encode` turns the template's output into token ids, with each mark as the
    plain text of the token that it hides.

    Args:
        tokenizer: the model's tokenizer.
        literal: the tokenizer's copy for plain text, needed if several threads encode; None: the tokenizer itself is
            used.
        others: further tokens to hide, which the tokenizer does not count as special, such as an image's placeholder.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, literal: LiteralCopy | None = None, others: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._literal = literal
        added = tokenizer.added_tokens_decoder
        self._ids = {str(token): index for index, token in added.items() if token.special}
        self._ids |= {token: tokenizer.convert_tokens_to_ids(token) for token in others if token not in self._ids}
        longest_first = sorted(filter(None, self._ids), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._mark = f"x{secrets.token_hex(16)}x"  # letters and digits: templates may quote or strip what is around it
        self._hidden: list[str] = []

    @property
    def any(self) -> bool:
        """Whether `hide` has hidden a token."""
        return bool(self._hidden)

    def found(self, text: str) -> bool:
        """Whether a text contains a special token."""
        return bool(self._special.search(text))

    def hide(self, value: Any) -> Any:
        """Return a copy of a value in which marks replace all special tokens, in every string of its lists and dicts.

        Args:
            value: messages, or other arguments of a chat template.
        """
        match value:
            case str():
                return self._special.sub(self._marked, value)
            case dict():
                return {self.hide(key): self.hide(each) for key, each in value.items()}
            case list():
                return [self.hide(each) for each in value]
        return value

    def _marked(self, match: re.Match[str]) -> str:
        self._hidden.append(match[0])
        return f"{self._mark}{len(self._hidden) - 1}x"

    def encode(self, text: str) -> list[int]:
        """Encode a chat template's output, in which each mark becomes the plain text of the token that it hides.

        Args:
            text: the template's output.

        Raises:
            ValueError: the tokenizer can't encode a special token as plain text.
        """
        if not self._hidden:
            return self._encoded(text)
        mark = re.compile(f"{self._mark}([0-9]+)x")
        ids: list[int] = []
        as_it_is = ""
        for part in re.split(f"({self._special.pattern})", text):
            if mark.search(part):
                ids += self._encoded(as_it_is)
                as_it_is = ""
                ids += self._as_text(mark.sub(lambda found: self._hidden[int(found[1])], part))
            else:
                as_it_is += part
        return ids + self._encoded(as_it_is)

    def _encoded(self, text: str) -> list[int]:
        # The template has written BOS already. Half a character is found here, wherever it was.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []

    def _as_text(self, text: str) -> list[int]:
        ids = _literal_tokens(self._tokenizer, self._literal, text, add_special_tokens=False)
        for token in self._special.findall(text):
            if self._ids[token] in ids:
                raise UserError(f"a text has {token!r}, which this tokenizer can't take as text; leave it out")
        return ids
