"""Grammars for reasoning models: any text up to the end of the reasoning block, then text that follows a grammar.

The block may end anywhere in a draft tree. So each node is masked according to whether it lies before or after the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lp.sampling.grammar import WORD, Grammar, Matcher


@dataclass(frozen=True)
class ReasoningBlock:
    """The special tokens around a model's reasoning.

    Attributes:
        begin: id of the token that begins the reasoning, such as <think>.
        end: id of the token that ends the reasoning, such as </think>.
    """

    begin: int
    end: int


class AfterReasoning:
    """A grammar for answers that may begin with a reasoning block: it applies after the block, or at once without one.

    Within the block every token is allowed except those that end the text.

    Args:
        grammar: the grammar of the text after the block.
        block: the tokens that begin and end the block.
        is_open: whether the prompt has already begun the block, so that the answer starts within it.
    """

    def __init__(self, grammar: Grammar, block: ReasoningBlock, is_open: bool = False) -> None:
        self.text = f"after {block}, {'open' if is_open else 'not open'}: {grammar.text}"
        self._grammar = grammar
        self._block = block
        self._is_open = is_open

    def matcher(self, eos: Sequence[int]) -> Matcher:
        """Make a matcher that stands at the beginning of an answer.

        Args:
            eos: ids of the EOS tokens; they are forbidden within the reasoning block.
        """
        return _Matcher(self._grammar.matcher(eos), self._block, self._is_open, eos)


class _Matcher:
    """A position before, within or behind the reasoning block.

    Args:
        matcher: follows the grammar behind the block; nothing has been read yet.
        block: the tokens that begin and end it.
        is_open: the text begins within the block.
        eos: tokens that end a text.
    """

    def __init__(self, matcher: Matcher, block: ReasoningBlock, is_open: bool, eos: Sequence[int]) -> None:
        self._matcher = matcher
        self._block = block
        self._is_open = is_open
        self._eos = {*eos}
        self._length = 0  # tokens of the text
        self._start: int | None = None  # how many of them come before the grammar; None where it has not begun

    def accept(self, token: int) -> bool:
        if self._start is not None:
            taken = self._matcher.accept(token)
        elif self._is_within:
            taken = token not in self._eos
            if taken and token == self._block.end:
                self._start = self._length + 1
        elif token == self._block.begin:
            taken = True
        else:
            taken = self._matcher.accept(token)
            self._start = 0 if taken else None
        self._length += taken
        return taken

    def rollback(self, count: int) -> None:
        self._length -= count
        if self._start is not None:
            self._matcher.rollback(min(count, self._length + count - self._start))
            if self._length < max(self._start, 1):
                self._start = None

    @property
    def ended(self) -> bool:
        return self._start is not None and self._matcher.ended

    def allowed(self, mask: torch.Tensor) -> None:
        if self._start is None and self._is_within:
            mask.fill_(-1)
            for token in self._eos:
                mask[token // WORD] &= ~_bit(token)
            return
        self._matcher.allowed(mask)
        begin = self._block.begin
        if self._start is None and begin // WORD < len(mask):
            mask[begin // WORD] |= _bit(begin)

    def forced(self) -> list[int]:
        return [] if self._start is None else self._matcher.forced()

    @property
    def _is_within(self) -> bool:
        """Whether the next token is within the block, provided that the grammar has not begun."""
        return self._is_open or self._length > 0


def _bit(token: int) -> int:
    """The bit of a token in its word of a mask, which is signed."""
    bit = token % WORD
    return 1 << bit if bit < WORD - 1 else -(1 << bit)
