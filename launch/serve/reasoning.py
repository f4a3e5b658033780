"""Separates a model's reasoning from its answer, by the tokens that begin and end reasoning, such as <think>."""

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
    """Check the value of the config key `reasoning`, and return it: the names of two tokens, "auto" or None.

    Args:
        given: the key's value, such as ["<think>", "</think>"].

    Raises:
        ValueError: the value is something else.
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
    """Find the tokens that begin and end a model's reasoning; None if the config key `reasoning` is null.

    Args:
        tokenizer: the model's tokenizer.
        given: value of the key; "auto" takes the first known pair that the vocabulary has, such as <think>, </think>.

    Raises:
        ValueError: the vocabulary lacks the tokens.
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
    """Where a generated text may have reasoning: at its beginning, between two special tokens.

    Attributes:
        begin, end: ids of the tokens that begin and end reasoning.
        is_open: whether the prompt has begun the reasoning already, so that the first generated token belongs to it.
    """

    begin: int
    end: int
    is_open: bool

    @classmethod
    def after(cls, block: ReasoningBlock, prompt: Sequence[int], words: Vocabulary) -> Reasoning | None:
        """Find out where the text after a prompt may have reasoning; None if the prompt has already ended it.

        Chat templates may open the reasoning at the prompt's end, or open and close it there to switch it off.

        Args:
            block: the tokens that begin and end reasoning.
            prompt: token ids, chat template included.
            words: the model's vocabulary, used to skip white space at the prompt's end.
        """
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
    """Decodes a text that may begin with reasoning, and separates the reasoning from the answer after it.

    It has the methods of `TextWatch`. Stop strings and limits only count in the answer.

    Args:
        words: the model's vocabulary.
        prompt: token ids of the prompt.
        reasoning: where the text may have reasoning.
        answer: decodes the answer after the reasoning, and looks for its end.

    Attributes:
        num_thought: number of tokens of the reasoning so far, including those that begin and end it.
    """

    def __init__(self, words: Vocabulary, prompt: Sequence[int], reasoning: Reasoning, answer: TextWatch) -> None:
        self._reasoning = reasoning
        self._detokenizer = Detokenizer(words, prompt)
        self._answer = answer
        self._is_within = reasoning.is_open
        self.num_thought = 0
        self._shown = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Decode the tokens of the next decode step.

        Args:
            tokens: token ids that the step added.

        Returns:
            The characters that the tokens add to the answer; `thought` returns those added to the reasoning.
        """
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
        """Characters of the reasoning that were added since the last call."""
        shown, self._shown = self._shown, ""
        return shown

    def flush(self) -> str:
        """The answer's last characters, which `push` held back; call it once the text has ended."""
        if self._is_within:
            self._shown += self._detokenizer.flush()
        return self._answer.flush()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of reasoning and answer so far, without tokens after a stop string."""
        return self.num_thought + self._answer.num_tokens

    @property
    def ended(self) -> bool:
        """Whether a stop string, or a limit that the client set, has ended the text."""
        return self._answer.ended

    @property
    def found(self) -> str | None:
        """The stop string that ended the text; None if no stop string has."""
        return self._answer.found
