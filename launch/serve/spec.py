"""What a text is generated from: plain data, which rank 0 sends to the other ranks."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import safetensors.torch
import torch
from torch.nn.functional import pad
from transformers import LogitsProcessor, SequenceBiasLogitsProcessor

import lp
from lp.models.prompt_images import TOKEN_TYPES
from lp.sampling.grammar import Grammar
from lp.sampling.penalties import CountPenalty, RecentRepetitionPenalty
from lp.sampling.reasoning import BehindReasoning, ReasoningBlock

from .grammars import Grammars


@dataclass(frozen=True, eq=False)
class SentTensors:
    """Images of a prompt as its model's processor made them, by rank 0 alone: all ranks get the same bits.

    Args:
        tensors: what `Engine.submit` takes besides the tokens, by name.
    """

    tensors: Mapping[str, torch.Tensor]

    @cached_property
    def text(self) -> str:
        """The tensors as text, for JSON."""
        data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in self.tensors.items()})
        return base64.b64encode(data).decode()

    @classmethod
    def of(cls, text: str) -> SentTensors:
        """Tensors from their text."""
        return cls(safetensors.torch.load(base64.b64decode(text)))

    def behind(self, resumed: int) -> dict[str, torch.Tensor]:
        """The tensors for a prompt that so many tokens of text were added to, each of which has a type."""
        return {
            name: pad(tensor, (0, resumed)) if name in TOKEN_TYPES else tensor for name, tensor in self.tensors.items()
        }


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """What is asked of one text: its prompt, and how it is generated and ends.

    Args:
        prompt: token ids.
        max_new_tokens: most tokens to add.
        sampling: the fields of lp.SamplingParams, the seed among them; None is greedy.
        sequence: index among the choices of a prompt, which the noise of sampling depends on.
        eos: token ids that end it; None takes the model's.
        logit_bias: added to the logits of a token, by its id.
        presence_penalty: subtracted from the logits of tokens that were generated.
        frequency_penalty: the same, once for each time.
        repeat_last_n: the penalties, that of `sampling` too, are on so many last tokens; -1 is all, 0 is no penalty.
        prediction: tokens that the client expects.
        grammar: (kind, text) of the grammar that the text follows, as of `Grammars.grammar`; None for none.
        resumed: first tokens of the text, which a server before this one generated.
        reasoning: the fields of `Reasoning` where the text may begin with some; None where it does not.
        logprobs: how many of the likeliest tokens are reported beside each token; None reports none, and no log
            probability of the token either.
        owner: name of the client's key; empty where it has none.
        corpora: names of the server's corpora that the text may look in; None: all.
        images: images of the prompt; None for none.
        adapter: name of the adapter that the text goes through; None for none.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: dict[str, Any] | None = None
    sequence: int = 0
    eos: list[int] | None = None
    logit_bias: list[tuple[int, float]] = field(default_factory=list)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    prediction: list[int] = field(default_factory=list)
    grammar: tuple[str, str] | None = None
    resumed: list[int] = field(default_factory=list)
    logprobs: int | None = None
    reasoning: Sequence[int] | None = None
    owner: str = ""
    corpora: Sequence[str] | None = None
    images: SentTensors | None = None
    adapter: str | None = None

    def as_data(self) -> dict[str, Any]:
        """Its fields in JSON's types; not copied, as prompts are long."""
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        return data | {"images": self.images.text} if self.images else data

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> TextSpec:
        """A text from what `as_data` gave, back from JSON."""
        images = SentTensors.of(data["images"]) if data.get("images") else None
        return cls(**{**data, "images": images})

    @property
    def resumable(self) -> bool:
        """Whether the text can go on behind tokens that are known: a grammar and log probabilities are of all of it."""
        return self.grammar is None and self.logprobs is None

    def arguments(self, grammars: Grammars) -> dict[str, Any]:
        """The arguments with which `Engine.submit` takes this text.

        Args:
            grammars: compiles the grammar.

        Raises:
            ValueError: a value out of range.
        """
        return {
            "input_ids": [*self.prompt, *self.resumed],
            "max_new_tokens": self.max_new_tokens - len(self.resumed),
            "sampling": self._sampling_params(),
            "sequence": self.sequence,
            "eos_token_id": self.eos,
            "logits_processor": self._processors(),
            "prediction": self.prediction,
            "grammar": self._grammar(grammars),
            "continued": len(self.resumed),
            "owner": self.owner,
            "corpora": self.corpora,
            "adapter": self.adapter,
            **(self.images.behind(len(self.resumed)) if self.images else {}),
        }

    def _grammar(self, grammars: Grammars) -> Grammar | None:
        """The grammar of the text, which begins behind its reasoning."""
        if self.grammar is None:
            return None
        grammar = grammars.grammar(*self.grammar)
        if self.reasoning is None:
            return grammar
        begin, end, is_open = self.reasoning
        return BehindReasoning(grammar, ReasoningBlock(begin, end), bool(is_open))

    def _sampling_params(self) -> lp.SamplingParams | None:
        """How tokens are sampled, but for a penalty on the last tokens alone, which is a processor."""
        if self.sampling is None:
            return None
        return lp.SamplingParams(**self.sampling | ({} if self.repeat_last_n == -1 else {"repetition_penalty": 1.0}))

    def _processors(self) -> list[LogitsProcessor]:
        processors: list[LogitsProcessor] = []
        last = None if self.repeat_last_n == -1 else self.repeat_last_n
        if (self.presence_penalty or self.frequency_penalty) and last != 0:
            processors.append(CountPenalty(len(self.prompt), self.presence_penalty, self.frequency_penalty, last))
        if biases := {(token,): bias for token, bias in self.logit_bias if bias}:
            processors.append(SequenceBiasLogitsProcessor(biases))
        penalty = (self.sampling or {}).get("repetition_penalty", 1.0)
        if last and penalty != 1:
            processors.append(RecentRepetitionPenalty(penalty, last))
        return processors
