"""Decides when a generated text ends, token by token, as transformers' `generate` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StopStringCriteria

from lp.checks import check_kind
from lp.errors import UserError
from lp.parallel.message import Stop

FINISH_REASON = {
    Stop.EOS: "eos",
    Stop.MAX_LENGTH: "length",
    Stop.CRITERIA: "criteria",
    Stop.STOP_STRING: "stop_string",
    Stop.CONTEXT: "context",
    Stop.INTERRUPTED: "interrupted",
}
ROOM = 8192  # token ids that the tensor for criteria has room for from the start: 64 KiB


@dataclass
class Stopping:
    """All settings of one call that may end its text; `check` tells whether the newest tokens end it.

    Attributes:
        eos: token ids that end the text.
        max_new_tokens: most tokens to generate.
        room: how many tokens can be generated until the model's context is full; None: the context has no limit.
        prompt: token ids of the prompt, left padding included, since criteria see the padding too.
        stop_strings: transformers' criterion for the call's stop strings; None: there are none.
        criteria: the caller's criteria, which may look at more than the tokens, such as the clock.
        device: the model's device, on which criteria expect token ids, as in transformers' `generate`.
    """

    eos: frozenset[int]
    max_new_tokens: int
    room: int | None
    prompt: list[int]
    stop_strings: StopStringCriteria | None
    criteria: list[StoppingCriteria]
    device: torch.device
    _ids: torch.Tensor = field(default_factory=lambda: torch.empty(1, 0, dtype=torch.int64), repr=False)
    _num_ids: int = 0  # how many ids of prompt and generated tokens the tensor has

    @classmethod
    def build(
        cls,
        eos: frozenset[int],
        max_new_tokens: int,
        room: int | None,
        prompt: list[int],
        stop_strings: str | Iterable[str] | None,
        tokenizer: PreTrainedTokenizerBase | None,
        criteria: list[StoppingCriteria],
        device: torch.device,
    ) -> Stopping:
        """Check and gather the settings of one call that may end its text.

        Args:
            eos, max_new_tokens, room, prompt, criteria, device: see the attributes of `Stopping`.
            stop_strings: a string, such as "</w>", or several; any of them ends the text. None: there are none.
            tokenizer: the model's tokenizer, which stop strings need; None if there are no stop strings.

        Raises:
            ValueError: there are stop strings and no tokenizer, or a stop string is empty or no string.
        """
        strings = None
        if asked := _listed(stop_strings):
            if tokenizer is None:
                raise UserError(f"stop_strings is {asked!r} but no tokenizer was given; pass tokenizer=")
            check_kind("tokenizer", tokenizer, PreTrainedTokenizerBase, "the model's, as lp.load(...).tokenizer")
            strings = StopStringCriteria(tokenizer, _spellings(tokenizer, asked))
        return cls(eos, max_new_tokens, room, prompt, strings, criteria, device)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks, by name; instead of the criteria, only whether there are any."""
        strings = self.stop_strings.stop_strings if self.stop_strings else ()
        return {"eos_token_id": sorted(self.eos), "stop_strings": strings, "stopping_criteria": bool(self.criteria)}

    def check(self, tokens: Sequence[int], new: int) -> tuple[Stop, int]:
        """Check the newest tokens, one by one, for the first that ends the text.

        Args:
            tokens: ids of all generated tokens.
            new: number of tokens at the end of `tokens` that have not been checked yet.

        Returns:
            Why the text ends, and how many of the tokens to return; (Stop.NONE, len(tokens)) if it does not end.
        """
        self._num_ids = min(self._num_ids, len(self.prompt) + len(tokens) - new)
        for count in range(len(tokens) - new + 1, len(tokens) + 1):
            reason = self._reason(tokens, count)
            if reason:
                return reason, count
        return Stop.NONE, len(tokens)

    def _reason(self, tokens: Sequence[int], count: int) -> Stop:
        if tokens[count - 1] in self.eos:
            return Stop.EOS
        if self.stop_strings or self.criteria:
            ids = self._ids_of(tokens, count)
            if self.stop_strings and bool(self.stop_strings(ids, None)):
                return Stop.STOP_STRING
            if self.criteria:
                own = ids.to(self.device, copy=True)  # a copy, which criteria may keep or change
                if any(bool(torch.as_tensor(criterion(own, None)).all()) for criterion in self.criteria):
                    return Stop.CRITERIA
        if count >= self.max_new_tokens:
            return Stop.MAX_LENGTH
        return Stop.CONTEXT if self.room is not None and count >= self.room else Stop.NONE

    def _ids_of(self, tokens: Sequence[int], count: int) -> torch.Tensor:
        """Ids of the prompt and of the first `count` tokens, int64 (1, ids): a view of a tensor that is only added to.

        Converting the whole of a long text for each token would take as long as a step.
        """
        start, end = self._num_ids, len(self.prompt) + count
        if end > self._ids.shape[1]:
            grown = self._ids.new_empty(1, max(2 * end, ROOM))
            grown[:, :start] = self._ids[:, :start]
            self._ids = grown
        generated = tokens[max(start - len(self.prompt), 0) : count]
        self._ids[0, start:end] = torch.tensor([*self.prompt[start:], *generated], dtype=torch.int64)
        self._num_ids = end
        return self._ids[:, :end]


def _spellings(tokenizer: PreTrainedTokenizerBase, asked: list[str]) -> list[str]:
    """Stop strings, and the same strings with the names of added tokens replaced by what these decode to.

    The two differ if the tokenizer has a character in the place of a space, such as "▁", which a name may contain.
    """
    spelled = dict.fromkeys(asked)
    for token, added in tokenizer.added_tokens_decoder.items():
        for string in asked:
            if (name := str(added)) and name in string:
                text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
                spelled[string.replace(name, text or name)] = None
    return [*spelled]


def _listed(stop_strings: str | Iterable[str] | None) -> list[str]:
    """A caller's stop strings as a list; a lone string is a list of one, as in transformers.

    Raises:
        ValueError: an element is no string, or is empty.
    """
    if stop_strings is None:
        return []
    if not isinstance(stop_strings, Iterable):
        raise UserError(f"stop_strings is {stop_strings!r}; give a string, or a list of strings")
    listed = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    for each in listed:
        if not isinstance(each, str):
            raise UserError(f"stop_strings has {each!r}, which is no string; give strings alone")
        if not each:
            raise UserError("stop_strings has an empty string, which every text ends with; leave it out")
    return listed
