"""Checks whether a regular expression matches any text at all, or a given text; llguidance does it in linear time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from lp.sampling.regex_syntax import Node, raw, terminal
from lp.sampling.schema_document import UnplacedError

MARK = 257  # of the tokenizer below


class _ByteTokens:
    """A tokenizer with a token for every byte, as llguidance takes one."""

    eos_token_id = 256
    bos_token_id = None
    tokens: Sequence[bytes] = [*(bytes([byte]) for byte in range(256)), b"<eos>", b"<mark>"]
    special_token_ids: Sequence[int] = [256, MARK]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def byte_tokenizer() -> Any:
    """llguidance's form of a tokenizer that has a token for each of the 256 bytes, an EOS token and a mark token.

    With it, grammars are checked byte by byte. The mark token occurs only in grammars that mark where a list of unique
    items begins (`lp.sampling.unique_items`).
    """
    import llguidance
    from llguidance._tokenizer import TokenizerWrapper

    return llguidance.LLTokenizer(TokenizerWrapper(_ByteTokens()), slices=[])


@lru_cache(maxsize=256)
def has_no_text(right_side: str) -> bool:
    """Whether a Lark terminal matches no text at all, such as when two patterns of a JSON schema contradict each other.

    Args:
        right_side: the right side of the terminal's definition, in llguidance's Lark syntax, such as "(/a/ & /b/)".

    Raises:
        UnplacedError: the terminal is too large.
    """
    matcher = _matcher(right_side)
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    return not matcher.is_accepting() and not allowed % (1 << _ByteTokens.eos_token_id)


class Language:
    """The set of texts that a regular expression matches as a whole; tells whether a given text is in the set.

    Args:
        node: the expression's syntax tree, as `lp.sampling.regex_syntax` makes it.
    """

    def __init__(self, node: Node) -> None:
        self._right_side = terminal(node, raw)
        self._start: Any = None

    def has(self, text: str) -> bool:
        """Whether the expression matches this text from its beginning to its end."""
        if self._start is None:
            self._start = _matcher(self._right_side)
        matcher = self._start.deep_copy()
        tokens = list(text.encode())
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    def is_empty(self) -> bool:
        """Whether the expression matches no text at all."""
        return has_no_text(self._right_side)


def _matcher(right_side: str) -> Any:
    import llguidance

    matcher = llguidance.LLMatcher(byte_tokenizer(), f"start: T\nT: {right_side}", log_level=0)
    if matcher.is_error():
        error = matcher.get_error().splitlines()[0]
        raise UnplacedError("a pattern", f"is too large ({error}); write it with fewer repeats")
    return matcher
