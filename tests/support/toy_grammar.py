"""A grammar without a library: what may follow is a function of the last token and of how many there are."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

MOST_FORCED = 8


class ToyGrammar:
    """A grammar drawn from a seed; behind every text there is at least one token that may follow.

    Args:
        seed: the same seed gives the same rules.
        vocabulary: V, the number of tokens.
    """

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.text = f"toy {seed} {vocabulary}"
        self._vocabulary = vocabulary

    def allowed(self, text: Sequence[int]) -> frozenset[int]:
        """Tokens that may follow: one, some or most."""
        rng = random.Random(f"{self.text} {text[-1] if text else -1} {len(text) % 3}")
        share = rng.choice([0.0, 0.3, 0.8])
        some = {token for token in range(self._vocabulary) if rng.random() < share}
        return frozenset(some or {rng.randrange(self._vocabulary)})

    def matcher(self, eos: Sequence[int]) -> ToyMatcher:
        """A matcher at the beginning of a text, which one of these tokens ends."""
        return ToyMatcher(self, eos)


class ToyMatcher:
    """A place in a text of a `ToyGrammar`, with the methods that lp asks of a grammar's matcher."""

    def __init__(self, grammar: ToyGrammar, eos: Sequence[int]) -> None:
        self._grammar = grammar
        self._eos = {*eos}
        self._text: list[int] = []

    def accept(self, token: int) -> bool:
        taken = not self.ended and token in self._grammar.allowed(self._text)
        self._text += [token] if taken else []
        return taken

    def rollback(self, count: int) -> None:
        assert 0 <= count <= len(self._text)
        del self._text[len(self._text) - count :]

    @property
    def ended(self) -> bool:
        """An EOS was accepted."""
        return bool(self._text) and self._text[-1] in self._eos

    def allowed(self, mask: torch.Tensor) -> None:
        bits = [0] * mask.shape[0]
        for token in self._grammar.allowed(self._text):
            bits[token // 32] |= 1 << token % 32
        mask.copy_(torch.tensor([word - (1 << 32) * (word >> 31) for word in bits], dtype=torch.int32))

    def forced(self) -> list[int]:
        text = list(self._text)
        while len(text) < len(self._text) + MOST_FORCED and not (text and text[-1] in self._eos):
            only = self._grammar.allowed(text)
            if len(only) > 1:
                break
            text += only
        return text[len(self._text) :]


class ToyMask(LogitsProcessor):
    """The grammar as a processor for transformers' `generate`, the oracle: it reads the whole text at each token.

    Args:
        grammar: the grammar that the text follows.
        prompt_tokens: number of the prompt's tokens, which the grammar says nothing of.
    """

    def __init__(self, grammar: ToyGrammar, prompt_tokens: int) -> None:
        self._grammar = grammar
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -math.inf)
        for row, ids in enumerate(input_ids.tolist()):
            tokens = [*self._grammar.allowed(ids[self._prompt_tokens :])]
            masked[row, tokens] = scores[row, tokens]
        return masked
