"""A checkpoint's generation config: what lp does with each of its fields, and the logits processors that they ask for.

Transformers makes the processors from the config, so their order, defaults and arithmetic are those of its `generate`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
)

from lp.errors import UserError
from lp.sampling.params import SamplingParams

AUTO, NONE = "auto", "none"  # whether decoders follow the checkpoint's


class Does(StrEnum):
    """What lp does with a field of a generation config: follow it, leave it unused, or refuse it."""

    SCORES = "scores"  # done by a processor of transformers', on every node of a step
    CALL = "call"  # length, ends and outputs of a call: transformers hands them over, decoders have arguments for them
    UNUSED = "unused"  # how transformers would run, which changes no token of one path: lp has ways of its own
    DRAFTS = "drafts"  # how transformers would draft: lp drafts by itself
    REFUSED = "refused"


@dataclass(frozen=True)
class Field:
    """What lp does with one field of a generation config, such as `num_beams`.

    Attributes:
        does: where lp follows the field, or that it is unused or refused.
        neutral: values that ask for nothing, beside None; 1 for `num_beams`.
        why: the reason for refusing a value, and what can be done.
        refuses: (value, config) -> whether lp refuses this value; None: a REFUSED field refuses all but neutral values.
        changes_tokens: whether leaving the field out changes generated text.
    """

    does: Does
    neutral: tuple[Any, ...] = ()
    why: str = ""
    refuses: Callable[[Any, GenerationConfig], bool] | None = None
    changes_tokens: bool = True

    def asks(self, value: Any) -> bool:
        """Whether a value of the field asks for anything: it is neither None nor neutral."""
        return value is not None and not any(value is each or value == each for each in self.neutral)

    def refused(self, value: Any, config: GenerationConfig) -> bool:
        """Whether lp refuses a value of the field.

        Args:
            value: the field's value.
            config: the config with all other fields, on which it may depend.
        """
        if not self.asks(value):
            return False
        return self.refuses(value, config) if self.refuses else self.does is Does.REFUSED


def _contrastive(alpha: float, config: GenerationConfig) -> bool:
    return alpha > 0 and not config.do_sample and (config.top_k is None or config.top_k > 1)


def _watermark(watermark: Any, config: GenerationConfig) -> bool:
    """Whether a watermark is refused: "selfhash" fails where no token is green, SynthID's depends on earlier calls."""
    return getattr(watermark, "seeding_scheme", "") == "selfhash" or hasattr(watermark, "ngram_len")


_PATH = "lookahead decoding verifies one path, whose tokens are known from its prefix alone"
_GUIDANCE = "UnbatchedClassifierFreeGuidanceLogitsProcessor needs passes of the model beside those that verify"

_SCORES = Field(Does.SCORES)
_CALL = Field(Does.CALL)
_UNUSED = Field(Does.UNUSED)
_DRAFTS = Field(Does.DRAFTS)

# Every field of GenerationConfig, in its order; a test fails where transformers has one that is not here.
FIELDS = {
    # length
    "max_length": _CALL,
    "max_new_tokens": _CALL,
    "min_length": Field(Does.SCORES, (0,)),
    "min_new_tokens": Field(Does.SCORES, (0,)),
    "early_stopping": _UNUSED,  # of beams
    "max_time": _CALL,
    "stop_strings": _CALL,
    # strategy
    "do_sample": Field(Does.CALL, (False,)),
    "num_beams": Field(
        Does.REFUSED, (1,), f"{_PATH}, and a beam is kept or dropped by the scores of all others: take num_beams=1"
    ),
    "use_mtp": _DRAFTS,
    # cache
    "use_cache": Field(Does.REFUSED, (True,), "every step reads a cache", changes_tokens=False),
    "cache_implementation": Field(
        Does.UNUSED,
        ("dynamic", "static", "offloaded", "offloaded_static", "hybrid"),
        "lp has a cache of its own, which is not paged, and quantized by its own kv_dtype='int8' or 'fp8'",
        lambda value, config: value in ("quantized", "paged"),
        changes_tokens=False,
    ),
    "cache_config": _UNUSED,
    "max_cache_len": _UNUSED,
    # scores
    "temperature": Field(Does.SCORES, (1.0,)),
    "top_k": Field(Does.SCORES, (0,)),
    "top_p": Field(Does.SCORES, (1.0,)),
    "min_p": Field(Does.SCORES, (0.0,)),
    "top_h": _SCORES,
    "typical_p": Field(Does.SCORES, (1.0,)),
    "epsilon_cutoff": Field(Does.SCORES, (0.0,)),
    "eta_cutoff": Field(Does.SCORES, (0.0,)),
    "repetition_penalty": Field(Does.SCORES, (1.0,)),
    "encoder_repetition_penalty": Field(
        Does.REFUSED, (1.0,), "its processor looks at one sequence, and a step has several branches"
    ),
    "length_penalty": _UNUSED,  # of beams
    "no_repeat_ngram_size": Field(Does.SCORES, (0,)),
    "bad_words_ids": Field(Does.SCORES, ([],)),
    "renormalize_logits": Field(Does.SCORES, (False,)),
    "forced_bos_token_id": _SCORES,
    "forced_eos_token_id": _SCORES,
    "remove_invalid_values": Field(Does.SCORES, (False,)),
    "exponential_decay_length_penalty": _SCORES,
    "suppress_tokens": Field(Does.SCORES, ([],)),
    "begin_suppress_tokens": Field(Does.SCORES, ([],)),
    "sequence_bias": Field(Does.SCORES, ({}, [])),
    "token_healing": Field(Does.REFUSED, (False,), "it changes the prompt, with a tokenizer that lp does not get"),
    "guidance_scale": Field(Does.REFUSED, (1.0,), _GUIDANCE),
    "watermarking_config": Field(
        Does.SCORES, (), "this watermark is no function of one branch's tokens and scores", _watermark
    ),
    # outputs
    "num_return_sequences": _CALL,
    "output_attentions": Field(Does.REFUSED, (False,), "a step's attention is of a tree", changes_tokens=False),
    "output_hidden_states": Field(Does.REFUSED, (False,), "a step's hidden states are of a tree", changes_tokens=False),
    "output_scores": _CALL,
    "output_logits": _CALL,
    "return_dict_in_generate": _CALL,
    # special tokens
    "pad_token_id": _CALL,
    "bos_token_id": _CALL,
    "eos_token_id": _CALL,
    # encoder-decoders, which are refused
    "encoder_no_repeat_ngram_size": Field(
        Does.REFUSED, (0,), "its processor looks at one sequence, and a step has several branches"
    ),
    "decoder_start_token_id": _UNUSED,
    # drafts of transformers' own
    "is_assistant": Field(Does.REFUSED, (False,), "another model's drafts end by scores that lp does not return"),
    "num_assistant_tokens": _UNUSED,
    "num_assistant_tokens_schedule": _UNUSED,
    "assistant_confidence_threshold": _UNUSED,
    "prompt_lookup_num_tokens": _DRAFTS,
    "max_matching_ngram_size": _UNUSED,
    "assistant_early_exit": _DRAFTS,
    "assistant_lookbehind": _UNUSED,
    "target_lookbehind": _UNUSED,
    "assistant_ensemble_weight": _UNUSED,
    "speculation_type": _DRAFTS,
    # how transformers runs
    "compile_config": _UNUSED,
    "disable_compile": _UNUSED,
    "continuous_batching_config": _UNUSED,
    "low_memory": _UNUSED,
    # methods that transformers has moved to its hub
    "penalty_alpha": Field(Does.REFUSED, (0, 0.0), f"contrastive search compares hidden states; {_PATH}", _contrastive),
    "dola_layers": Field(Does.REFUSED, (), "it compares the logits of several layers"),
    "diversity_penalty": _UNUSED,  # of beams
    "num_beam_groups": _UNUSED,
    "constraints": Field(Does.REFUSED, (), f"constraints need beams, and {_PATH}"),
    "force_words_ids": Field(Does.REFUSED, (), f"forced words need beams, and {_PATH}"),
    "prefill_chunk_size": _UNUSED,
    "transformers_version": _UNUSED,
}
SAMPLED = tuple(item.name for item in fields(SamplingParams) if item.name in FIELDS)  # of SamplingParams
WARPERS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def refusals(config: GenerationConfig) -> dict[str, str]:
    """The fields of a generation config that lp refuses, each with a line for the user: its value and the reason."""
    found = {}
    for name, field in FIELDS.items():
        if field.refused(value := getattr(config, name, None), config):
            given = f"{name}={value}" if isinstance(value, bool) else f"{name} is {_short(value)}"
            found[name] = f"{given}; {field.why}"
    return found


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's generation config as lp follows it, for texts whose sampling a caller leaves open.

    Attributes:
        config: the config without the fields that lp refuses.
        says: fields that change scores, by name, and `do_sample` where it is true.
        left: fields that lp refuses, by name, each with the reason.
    """

    config: GenerationConfig
    says: dict[str, Any]
    left: dict[str, str]

    @classmethod
    def of(cls, config: GenerationConfig) -> Checkpoint:
        """Read a model's generation config.

        Where the config samples and sets no `top_k`, transformers' default of 50 holds.
        """
        config = copy.copy(config)
        left = {name: why for name, why in refusals(config).items() if FIELDS[name].changes_tokens}
        for name in left:
            setattr(config, name, None)
        if config.do_sample and config.top_k is None:
            config.top_k = GenerationConfig._get_default_generation_params()["top_k"]
        says: dict[str, Any] = {"do_sample": True} if config.do_sample else {}
        for name, field in FIELDS.items():
            if field.does is Does.SCORES and field.asks(value := getattr(config, name, None)):
                says[name] = value
        return cls(config, says, left)

    @property
    def samples(self) -> bool:
        """Whether the checkpoint asks for sampling, where a caller asks for nothing."""
        return bool(self.config.do_sample)

    @property
    def sampling(self) -> dict[str, Any]:
        """The checkpoint's settings that `SamplingParams` has fields for, by name."""
        return {name: self.says[name] for name in SAMPLED if name in self.says}

    def said(self, sampling: SamplingParams | None) -> dict[str, Any]:
        """The checkpoint's settings that still hold beside a caller's sampling, by name.

        Args:
            sampling: the caller's, which wins in all its fields; None: the caller left it open.
        """
        overridden = set() if sampling is None else {"do_sample", *SAMPLED}
        if not (self.samples if sampling is None else sampling.temperature):
            overridden |= {*WARPERS}  # greedy
        return {name: value for name, value in self.says.items() if name not in overridden}

    def line(self, sampling: SamplingParams | None) -> str:
        """One line for the user: which settings of the checkpoint are followed and which lp refuses; "" without any.

        Args:
            sampling: the caller's, which wins in all its fields; None: the caller left it open.
        """
        parts = []
        if said := self.said(sampling):
            listed = ", ".join(f"{name}={_short(value)}" for name, value in said.items())
            parts.append(f"the checkpoint's generation_config is followed: {listed}")
        if self.left:
            parts.append(f"of the checkpoint's generation_config lp does not do: {'. '.join(self.left.values())}")
        return "; ".join([*parts, "generation_config='none' leaves it out"]) if parts else ""

    def applied(
        self,
        sampling: SamplingParams | None,
        processors: Iterable[LogitsProcessor],
        *,
        model_config: Any,
        padding: int,
        length: int,
        max_length: int,
        eos: Collection[int],
        device: torch.device,
    ) -> tuple[SamplingParams | None, list[LogitsProcessor]]:
        """How a text is sampled, and all its logits processors in order, warpers included.

        Args:
            sampling: the caller's, which wins in all its fields; None follows the checkpoint.
            processors: the caller's logits processors; each replaces one of the same class that the checkpoint asks
                for.
            model_config: the model's own config.
            padding: tokens of left padding before the prompt.
            length: tokens of the prompt, padding included.
            max_length: tokens of the longest text, padding and prompt included.
            eos: token ids that end the text.
            device: where processors hold their tensors.

        Returns:
            Sampling with seed and verifier alone, as all else is among the processors, and None for greedy; the
            processors.

        Raises:
            ValueError: a value that transformers does not take.
        """
        config = copy.copy(self.config)
        if sampling is not None:
            config.do_sample = sampling.temperature > 0
            for name in SAMPLED:
                value = getattr(sampling, name)
                setattr(config, name, value if FIELDS[name].asks(value) else None)
        config.max_length = max_length
        if config.min_new_tokens is not None:
            config.min_length = length + config.min_new_tokens
        config._eos_token_tensor = torch.tensor(sorted(eos), device=device) if eos else None
        if not eos:
            config.exponential_decay_length_penalty = None
        mask = torch.tensor([[0] * padding + [1] * (length - padding)], device=device) if padding else None
        try:
            made = _Maker(model_config)._get_logits_processor(
                generation_config=config,
                input_ids_seq_length=length,
                logits_processor=LogitsProcessorList(processors),
                device=device,
                model_kwargs={"attention_mask": mask},
            )
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the checkpoint's generation_config can't be followed: {error}; generation_config='none' leaves it out"
            ) from error
        all_processors = [of_prompt(processor, 0) for processor in made]
        if not config.do_sample:
            return None, all_processors
        if sampling is None:
            return SamplingParams(), all_processors
        return SamplingParams(seed=sampling.seed, verifier=sampling.verifier), all_processors


def of_prompt(processor: LogitsProcessor, index: int) -> LogitsProcessor:
    """The logits processor for one prompt of a batch, where transformers has prepared it for all of them.

    Args:
        processor: the processor that transformers made.
        index: the prompt's place in the batch.
    """
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, torch.Tensor):
        processor = copy.copy(processor)  # of its own class, which may do more
        processor.prompt_ignore_length = int(ignored[index])
    return processor


class _Maker(GenerationMixin):
    """Transformers' code that makes processors of a generation config; it needs nothing of a model but its config."""

    def __init__(self, config: Any) -> None:
        self.config = config


def _short(value: Any) -> str:
    """A value in one short line; a list of many tokens by their number."""
    if isinstance(value, dict | list | tuple) and len(value) > 6:
        return f"{len(value)} entries"
    return repr(value) if not hasattr(value, "to_dict") else type(value).__name__
