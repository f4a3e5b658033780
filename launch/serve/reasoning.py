"""Models that think first: which tokens are around their reasoning, and what of an answer is reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lp.errors import UserError
from lp.sampling.reasoning import ReasoningBlock

from ..text.detokenizer import Detokenizer, Vocabulary
from .stopping import TextWatch

AUTO = "auto"
KNOWN = (  # Qwen3, DeepSeek-R1, SmolLM3 and GLM; Magistral; Cohere; Seed
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)


def reasoning_names(given: object) -> tuple[str, str] | str | None:
    """What the key `reasoning` says: two tokens, "auto" or none.

    Raises:
        ValueError: it says something else.
    """
    if given is None or given == AUTO:
        return given if given is None else AUTO
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2:
        first, last = given
        if isinstance(first, str) and isinstance(last, str) and first != last:
            return first, last
    raise UserError(
        f"reasoning is {given!r}; give {AUTO}, null, or the two tokens around it as in reasoning='[<think>,</think>]'"
    )


def reasoning_block(tokenizer: PreTrainedTokenizerBase, given: object) -> ReasoningBlock | None:
    """The tokens around a model's reasoning; None where none are asked for.

    Args:
        tokenizer: the model's.
        given: the key `reasoning`.

    Raises:
        ValueError: the tokenizer has no such tokens.
    """
    names = reasoning_names(given)
    if names is None:
        return None
    vocabulary = tokenizer.get_vocab()
    pairs = KNOWN if isinstance(names, str) else [names]
    for begin, end in pairs:
        if begin in vocabulary and end in vocabulary:
            return ReasoningBlock(vocabulary[begin], vocabulary[end])
    known = ", or ".join(f"{begin} and {end}" for begin, end in pairs)
    raise UserError(
        f"reasoning is {given!r}, but the model's vocabulary has no tokens {known}; name its own, or leave "
        "reasoning out"
    )


@dataclass(frozen=True)
class Reasoning:
    """Where the reasoning of a text can be.

    Attributes:
        begin, end: token ids around it.
        is_open: the prompt ends within it.
    """

    begin: int
    end: int
    is_open: bool

    @classmethod
    def behind(cls, block: ReasoningBlock, prompt: Sequence[int], words: Vocabulary) -> Reasoning | None:
        """The reasoning of a text behind a prompt; None where the prompt's template has ended it."""
        for token in reversed(prompt):
            if token == block.end:
                return None
            if token == block.begin:
                return cls(block.begin, block.end, True)
            data = words.data(token)
            if not data or data.strip():  # all but white space
                break
        return cls(block.begin, block.end, False)


class ReasoningWatch:
    """A text whose first part is reasoning; stop strings are looked for behind it.

    Args:
        words: the model's tokens.
        prompt: token ids.
        reasoning: where it can be.
        answer: watches what comes behind the reasoning.

    Attributes:
        num_thought: how many tokens the reasoning has, those around it included.
    """

    def __init__(self, words: Vocabulary, prompt: Sequence[int], reasoning: Reasoning, answer: TextWatch) -> None:
        self._reasoning = reasoning
        self._detokenizer = Detokenizer(words, prompt)
        self._answer = answer
        self._is_within = reasoning.is_open
        self.num_thought = 0
        self._shown = ""

    def push(self, tokens: Sequence[int]) -> str:
        """The characters of the answer that these tokens complete; `thought` has those of the reasoning."""
        rest = [*tokens]
        if rest and not self.num_tokens and not self._is_within and rest[0] == self._reasoning.begin:
            self._is_within = True
            self.num_thought += 1
            rest = rest[1:]
        if self._is_within and rest:
            has_end = self._reasoning.end in rest
            count = rest.index(self._reasoning.end) if has_end else len(rest)
            self._shown += self._detokenizer.push(rest[:count])
            if has_end:
                self._shown += self._detokenizer.flush()
                self._is_within = False
            self.num_thought += count + has_end
            rest = rest[count + has_end :]
        return self._answer.push(rest) if rest else ""

    def thought(self) -> str:
        """The characters of the reasoning that came since the last call."""
        shown, self._shown = self._shown, ""
        return shown

    def flush(self) -> str:
        """What was held back of a text that has ended."""
        if self._is_within:
            self._shown += self._detokenizer.flush()
        return self._answer.flush()

    @property
    def num_tokens(self) -> int:
        """How many tokens both parts have, up to where the client wants no more."""
        return self.num_thought + self._answer.num_tokens

    @property
    def ended(self) -> bool:
        """Whether the client wants no more."""
        return self._answer.ended

    @property
    def found(self) -> str | None:
        """The stop string that ended the text."""
        return self._answer.found
