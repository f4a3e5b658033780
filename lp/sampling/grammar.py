"""Texts that follow a grammar: tokens that it forbids are never sampled, at any node of a draft tree.

`lp.sampling.grammar_compiler` makes grammars by llguidance; another library takes its place by the two protocols below.
n: nodes, L: tokens of the prefix, V: vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from transformers import LogitsProcessor

from lp.errors import UserError
from lp.to_device import to_device

WORD = 32  # tokens whose bits are one int32 of a mask


class GrammarError(UserError):
    """A text can't go on to follow its grammar. The message begins with what is at fault, "the grammar"."""


class Matcher(Protocol):
    """A place in a text that follows a grammar."""

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and the place stays, where the grammar forbids it or the text has ended."""
        ...

    def rollback(self, count: int) -> None:
        """Go back by so many accepted tokens."""
        ...

    @property
    def ended(self) -> bool:
        """An EOS was accepted: nothing follows."""
        ...

    def allowed(self, mask: torch.Tensor) -> None:
        """Write which tokens may follow: bits of int32 (V / 32,), the lowest bit of a word first; on the host."""
        ...

    def forced(self) -> list[int]:
        """Tokens that are likely to follow because their characters must; none where nothing must."""
        ...


class Grammar(Protocol):
    """What a text has to follow.

    Attributes:
        text: what it was made from, by which ranks compare it.
    """

    text: str

    def matcher(self, eos: Sequence[int]) -> Matcher:
        """A matcher at the beginning of a text that one of these tokens ends."""
        ...


class Cursor:
    """A matcher that goes to a text, and to branches behind it.

    Args:
        matcher: a matcher at the beginning of a text.

    Attributes:
        text: the tokens behind which it is.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.text: list[int] = []

    def go_to(self, text: Sequence[int]) -> bool:
        """Go to a text from its beginning; False where the grammar forbids it, and the place is then a part of it."""
        text = list(text)
        if text[: len(self.text)] != self.text:
            lengths = range(1, min(len(self.text), len(text)) + 1)
            same = bisect_left(lengths, True, key=lambda length: self.text[:length] != text[:length])
            self.matcher.rollback(len(self.text) - same)
            del self.text[same:]
        return all(self.go_on(token) for token in text[len(self.text) :])

    def go_on(self, token: int) -> bool:
        """Go on by a token, if the grammar takes it."""
        if self.matcher.ended or not self.matcher.accept(token):
            return False
        self.text.append(token)
        return True

    def go_back(self, count: int) -> None:
        """Go back by so many tokens."""
        if count:
            self.matcher.rollback(count)
            del self.text[-count:]

    def visit(self, branches: Sequence[Sequence[int]]) -> Iterator[tuple[int, bool]]:
        """Go to every branch behind the text, by the shortest way, and back to the text at the end.

        Yields:
            The index of the branch, and whether the grammar takes all of it; if so, the place is behind it.
        """
        start = len(self.text)
        try:
            for index in sorted(range(len(branches)), key=lambda index: list(branches[index])):
                branch = branches[index]
                same = common_length(self.text[start:], branch)
                self.go_back(len(self.text) - start - same)
                yield index, all(self.go_on(token) for token in branch[same:])
        finally:
            self.go_back(len(self.text) - start)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


class GrammarProcessor(LogitsProcessor):
    """Masks what a grammar forbids, of each node by its own prefix.

    A node that the grammar forbids itself is left as it is: no walk reaches it, as its parent never samples it. Where
    the processors before this one left no token that it allows, all scores are NaN, so that none is sampled.

    Args:
        grammar: what the text follows.
        eos: tokens that end it.
        prompt_tokens: how many tokens the prompt has, padding included, behind which the text begins.
    """

    per_branch = True

    def __init__(self, grammar: Grammar, eos: Sequence[int], prompt_tokens: int) -> None:
        self.text = grammar.text
        self.prompt_tokens = prompt_tokens
        self._cursor = Cursor(grammar.matcher(eos))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (n, V); -inf where a token is forbidden.

        Args:
            input_ids: (n, L).
            scores: (n, V).
        """
        first, *_ = rows = input_ids.tolist()
        return self.of_branches(first[: self.prompt_tokens], [row[self.prompt_tokens :] for row in rows], scores)

    def of_branches(self, text: Sequence[int], branches: Sequence[Sequence[int]], scores: torch.Tensor) -> torch.Tensor:
        """Scores (n, V) of nodes behind one text, whose length then costs nothing for each of them.

        Args:
            text: padding, prompt and generated tokens.
            branches: the tokens of every node behind the text, up to the node itself.
            scores: (n, V).
        """
        num_nodes, vocabulary = scores.shape
        masks = torch.full((num_nodes, math.ceil(vocabulary / WORD)), -1, dtype=torch.int32)
        if self._cursor.go_to(text[self.prompt_tokens :]):
            for node, allowed in self._cursor.visit(branches):
                if allowed and not self._cursor.matcher.ended:
                    self._cursor.matcher.allowed(masks[node])
        bytes_ = to_device(masks.view(torch.uint8).numpy(), scores.device)
        bits = bytes_[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=scores.device) & 1
        scores = scores.masked_fill(bits.flatten(1)[:, :vocabulary] == 0, -math.inf)
        none_left = (scores == -math.inf).all(-1, keepdim=True)
        return scores.masked_fill(none_left, math.nan)
