"""Generated text that follows a grammar: forbidden tokens are never sampled, at any node of a draft tree.

`lp.sampling.grammar_compiler` makes grammars by llguidance; another library takes its place by the protocols `Grammar`
and `Matcher`. n: nodes, L: tokens of the prefix, V: vocabulary.
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
    """Raised where a text can't go on to follow its grammar. The message begins with "the grammar"."""


class Matcher(Protocol):
    """A position in a text that follows a grammar; it moves token by token, and says which tokens may come next."""

    def accept(self, token: int) -> bool:
        """Move behind the next token; False, without a move, where the grammar forbids it or the text has ended."""
        ...

    def rollback(self, count: int) -> None:
        """Move back before the last `count` accepted tokens."""
        ...

    @property
    def ended(self) -> bool:
        """Whether an EOS token was accepted, behind which nothing may come."""
        ...

    def allowed(self, mask: torch.Tensor) -> None:
        """Write into a bit mask which tokens may come next.

        Args:
            mask: int32 (ceil(V / 32),) on the CPU, all of it written: the bit of a token is bit `token % 32`, from the
                lowest on, of word `token // 32`.
        """
        ...

    def forced(self) -> list[int]:
        """Draft tokens: what probably comes next, since the grammar leaves one choice of characters; else []."""
        ...


class Grammar(Protocol):
    """A compiled grammar, which gives each text a matcher of its own.

    Attributes:
        text: what it was made from, such as a JSON schema; ranks compare it.
    """

    text: str

    def matcher(self, eos: Sequence[int]) -> Matcher:
        """A matcher at the beginning of a text.

        Args:
            eos: token ids that end the text, where the grammar lets it end.
        """
        ...


class Cursor:
    """Moves a matcher from text to text by the fewest tokens: to a generated text, and to draft branches behind it.

    Args:
        matcher: a matcher at the beginning of a text.

    Attributes:
        text: token ids that the matcher has accepted.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.text: list[int] = []

    def go_to(self, text: Sequence[int]) -> bool:
        """Move the matcher to the end of a text, which need not go on from where the matcher is.

        Args:
            text: token ids from the text's beginning.

        Returns:
            False if the grammar forbids the text; the matcher is then behind the longest part of it that is allowed.
        """
        text = list(text)
        if text[: len(self.text)] != self.text:
            lengths = range(1, min(len(self.text), len(text)) + 1)
            same = bisect_left(lengths, True, key=lambda length: self.text[:length] != text[:length])
            self.matcher.rollback(len(self.text) - same)
            del self.text[same:]
        return all(self.go_on(token) for token in text[len(self.text) :])

    def go_on(self, token: int) -> bool:
        """Move the matcher behind one more token; False, without a move, where the grammar forbids it."""
        if self.matcher.ended or not self.matcher.accept(token):
            return False
        self.text.append(token)
        return True

    def go_back(self, count: int) -> None:
        """Move the matcher back by `count` tokens."""
        if count:
            self.matcher.rollback(count)
            del self.text[-count:]

    def visit(self, branches: Sequence[Sequence[int]]) -> Iterator[tuple[int, bool]]:
        """Move the matcher to the end of each branch of a draft tree, by the fewest tokens, and back at last.

        Args:
            branches: tokens of each node behind the text, up to and with the node itself.

        Yields:
            Index of a branch, and whether the grammar allows all of it; if so, the matcher is at its end just now.
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
    """How many tokens two sequences have in common at their beginnings."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


class GrammarProcessor(LogitsProcessor):
    """Logits processor that sets the scores of tokens that a grammar forbids to -inf, for each node by its own prefix.

    A node whose own prefix is forbidden keeps its scores: verification cannot reach it, as its parent never samples it.
    Where earlier processors left no token that the grammar allows, all scores are NaN, so that none is sampled.

    Args:
        grammar: what the generated text follows.
        eos: token ids that end the text.
        prompt_tokens: tokens of the prompt, left padding included; the grammar begins behind them.
    """

    per_branch = True

    def __init__(self, grammar: Grammar, eos: Sequence[int], prompt_tokens: int) -> None:
        self.text = grammar.text
        self.prompt_tokens = prompt_tokens
        self._cursor = Cursor(grammar.matcher(eos))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (n, V), with -inf for forbidden tokens.

        Args:
            input_ids: int64 (n, L), the prefix of each node; all begin with one prompt.
            scores: (n, V).
        """
        first, *_ = rows = input_ids.tolist()
        return self.of_branches(first[: self.prompt_tokens], [row[self.prompt_tokens :] for row in rows], scores)

    def of_branches(self, text: Sequence[int], branches: Sequence[Sequence[int]], scores: torch.Tensor) -> torch.Tensor:
        """Scores (n, V) of nodes behind one text, with -inf for forbidden tokens; `__call__` is slower on long texts.

        Args:
            text: token ids of padding, prompt and generated tokens.
            branches: tokens of every node behind the text, up to and with the node itself.
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
