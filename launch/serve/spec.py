"""The description of one sequence to generate, as plain data that rank 0 sends to the other ranks."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import safetensors.torch
import torch
from transformers import LogitsProcessor, SequenceBiasLogitsProcessor

import lp
from lp.sampling.grammar import Grammar
from lp.sampling.penalties import CountPenalty, RecentRepetitionPenalty
from lp.sampling.reasoning import AfterReasoning, ReasoningBlock

from .grammars import Grammars


@dataclass(frozen=True, eq=False)
class SentTensors:
    """A prompt's images as tensors, which rank 0 makes with the model's processor and sends to the other ranks.

    Args:
        tensors: arguments of `Engine.submit` by name, such as pixel_values.
    """

    tensors: Mapping[str, torch.Tensor]

    @cached_property
    def text(self) -> str:
        """The tensors as base64 text, which JSON can hold; `SentTensors.of` decodes it."""
        data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in self.tensors.items()})
        return base64.b64encode(data).decode()

    @classmethod
    def of(cls, text: str) -> SentTensors:
        """Decode the tensors that another rank has sent.

        Args:
            text: base64 text, from the sender's property `text`.
        """
        return cls(safetensors.torch.load(base64.b64decode(text)))


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """Everything that the engine needs to generate one sequence: its prompt, its sampling, and where it ends.

    Args:
        prompt: token ids of the prompt.
        max_new_tokens: most tokens to generate.
        sampling: fields of lp.SamplingParams by name, including the seed; None: decoding is greedy.
        sequence: index among the n choices for a prompt, from 0; with one seed, each index samples a different text.
        eos: ids of the tokens that end the text; None: the model's own.
        logit_bias: pairs of token id and the number to add to its logit.
        presence_penalty: amount subtracted from the logit of each token that the text already has.
        frequency_penalty: amount subtracted from a token's logit for each time that the text already has the token.
        repeat_last_n: how many of the last tokens the three penalties look at (the third is `sampling`'s repetition
            penalty); -1: all; 0: none, so that no penalty applies.
        prediction: token ids that the client expects, from which draft tokens come.
        grammar: kind and source of the grammar that the text follows, such as ("regex", "[0-9]+"); None: any text.
        resumed: ids of the text's first tokens, which a server generated before it was restarted.
        reasoning: (begin, end, is_open), the fields of `Reasoning`; None: reasoning is not separated from the answer.
        logprobs: how many of the likeliest tokens are reported beside each token and its log probability; None: no log
            probabilities are reported.
        owner: name of the client, whose earlier texts draft tokens may come from; empty if the client's key has no
            name.
        corpora: names of the server's corpora (files made by `lp corpus`) that draft tokens may come from; None: all.
        images: images in the prompt; None: there are none.
        adapter: name of the LoRA adapter to apply; None: the model alone.
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
        """The fields by name, as values that JSON can hold; `TextSpec.of` reads them on another rank.

        Lists are not copied, as prompts may be long.
        """
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        return data | {"images": self.images.text} if self.images else data

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> TextSpec:
        """Rebuild the description of a sequence that another rank has sent.

        Args:
            data: the sender's fields, from `as_data`.
        """
        images = SentTensors.of(data["images"]) if data.get("images") else None
        return cls(**{**data, "images": images})

    @property
    def resumable(self) -> bool:
        """Whether the text can be continued from kept tokens after a restart: not with a grammar or logprobs."""
        return self.grammar is None and self.logprobs is None

    def arguments(self, grammars: Grammars) -> dict[str, Any]:
        """The keyword arguments for `Engine.submit` that generate this sequence.

        Args:
            grammars: compiles the grammar.

        Raises:
            ValueError: a value is out of range.
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
            **(self.images.tensors if self.images else {}),
        }

    def _grammar(self, grammars: Grammars) -> Grammar | None:
        """The grammar of the text, which begins behind its reasoning."""
        if self.grammar is None:
            return None
        grammar = grammars.grammar(*self.grammar)
        if self.reasoning is None:
            return grammar
        begin, end, is_open = self.reasoning
        return AfterReasoning(grammar, ReasoningBlock(begin, end), bool(is_open))

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
