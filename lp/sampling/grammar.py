"""Generated text that follows a grammar: forbidden tokens are never sampled, at any node of a draft tree.

`lp.sampling.grammar_compiler` makes grammars with llguidance. To use another library, implement the protocols `Grammar`
and `Matcher` with it. n: nodes, L: tokens of the prefix, V: vocabulary.
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
    """Raised if a sequence cannot follow its grammar any further; the message begins with "the grammar"."""


class Matcher(Protocol):
    """Follows a grammar through one text: advances token by token, and tells which tokens may come next."""

    def accept(self, token: int) -> bool:
        """Advance by one token, unless the grammar forbids the token or the text has ended.

        Returns:
            Whether the matcher has advanced.
        """
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        ...

    @property
    def ended(self) -> bool:
        """Whether an EOS token was accepted, after which no token may come."""
        ...

    def allowed(self, mask: torch.Tensor) -> None:
        """Write the tokens that may come next into a bit mask.

        Args:
            mask: int32 (ceil(V / 32),) on the CPU, V being the vocabulary's size; all of it is overwritten. Bit `token
                % 32` of word `token // 32` is 1 if the token may come next; bit 0 is the lowest.
        """
        ...

    def forced(self) -> list[int]:
        """Draft tokens for the characters that the grammar forces next; [] if it leaves a choice.

        The characters are certain. The draft tokens are a guess, since a model may split the characters into other
        tokens.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar, which makes a new matcher for each text that must follow it.

    Attributes:
        text: what the grammar was made from, such as a JSON schema; ranks compare it to check that they use one
            grammar.
    """

    text: str

    def matcher(self, eos: Sequence[int]) -> Matcher:
        """Make a matcher that stands at the beginning of a text.

        Args:
            eos: ids of the EOS tokens; they are allowed wherever the grammar lets the text end.
        """
        ...


class Cursor:
    """Moves a matcher from one text to another in as few steps as possible, such as from one draft branch to the next.

    It undoes and accepts only the tokens in which the two texts differ.

    Args:
        matcher: a matcher that has accepted no token yet.

    Attributes:
        text: token ids that the matcher has accepted.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.text: list[int] = []

    def go_to(self, text: Sequence[int]) -> bool:
        """Move the matcher to the end of a text; tokens that it has accepted and the text does not have are undone.

        Args:
            text: token ids from the text's beginning.

        Returns:
            False if the grammar forbids the text. The matcher then stands at the end of the longest prefix that is
            allowed.
        """
        text = list(text)
        if text[: len(self.text)] != self.text:
            lengths = range(1, min(len(self.text), len(text)) + 1)
            same = bisect_left(lengths, True, key=lambda length: self.text[:length] != text[:length])
            self.matcher.rollback(len(self.text) - same)
            del self.text[same:]
        return all(self.go_on(token) for token in text[len(self.text) :])

    def go_on(self, token: int) -> bool:
        """Advance the matcher by one token; returns False, without advancing, if the grammar forbids the token."""
        if self.matcher.ended or not self.matcher.accept(token):
            return False
        self.text.append(token)
        return True

    def go_back(self, count: int) -> None:
        """Undo the last `count` tokens that the matcher has accepted."""
        if count:
            self.matcher.rollback(count)
            del self.text[-count:]

    def visit(self, branches: Sequence[Sequence[int]]) -> Iterator[tuple[int, bool]]:
        """Move the matcher to the end of each branch of a draft tree in turn, and finally back to where it started.

        Branches come in an order that needs few steps.

        Args:
            branches: a list for each node of the tree: the tokens after the matcher's text up to and including the
                node.

        Yields:
            (index of a branch, whether the grammar allows the whole branch). If it does, the matcher stands at the end
            of the branch until the next item is asked for.
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
    """Length of the longest common prefix of two token sequences."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


class GrammarProcessor(LogitsProcessor):
    """Logits processor that sets the scores of tokens that a grammar forbids at a node, given its prefix, to -inf.

    If the grammar forbids a node's prefix itself, the node keeps its scores: verification never reaches such a node, as
    its parent never samples it. If earlier processors left no token that the grammar allows, all scores of the node
    become NaN, so that none is sampled.

    Args:
        grammar: the grammar that the generated text follows.
        eos: token ids that end the text.
        prompt_tokens: number of tokens of the prompt, left padding included; the grammar applies to the tokens after
            them.
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
        """Mask the scores of draft-tree nodes that all continue one text: forbidden tokens get -inf.

        `__call__` takes the whole prefix of every node instead, which is slower for long texts.

        Args:
            text: token ids of padding, prompt and generated tokens.
            branches: a list for each node, with the tokens after the text up to and including the node.
            scores: (n, V), a row for each of n nodes, a column for each token of the vocabulary.

        Returns:
            Masked scores, (n, V).
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
