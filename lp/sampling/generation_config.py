"""What lp does with each field of a checkpoint's generation config, and which logits processors the fields ask for.

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
        does: whether lp follows the field (by logits processors or by arguments of a call), ignores it or refuses it.
        neutral: values that ask for nothing, as None does; 1 for `num_beams`.
        why: the reason for refusing a value, and what the user can do instead.
        refuses: function (value, config) -> whether lp refuses this value. None: if `does` is REFUSED, every value is
            refused except None and the neutral ones; otherwise no value is.
        changes_tokens: whether generated tokens may differ if the field is left out.
    """

    does: Does
    neutral: tuple[Any, ...] = ()
    why: str = ""
    refuses: Callable[[Any, GenerationConfig], bool] | None = None
    changes_tokens: bool = True

    def asks(self, value: Any) -> bool:
        """Whether a value of the field asks for anything, that is, whether it is neither None nor neutral."""
        return value is not None and not any(value is each or value == each for each in self.neutral)

    def refused(self, value: Any, config: GenerationConfig) -> bool:
        """Whether lp refuses a value of the field.

        Args:
            value: the field's value.
            config: the generation config with all other fields, since the answer may depend on other fields.
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
    """Find the fields of a generation config that lp refuses.

    Returns:
        A message for the user, by field name: the field's value and the reason for refusing it.
    """
    found = {}
    for name, field in FIELDS.items():
        if field.refused(value := getattr(config, name, None), config):
            given = f"{name}={value}" if isinstance(value, bool) else f"{name} is {_short(value)}"
            found[name] = f"{given}; {field.why}"
    return found


@dataclass(frozen=True)
class CheckpointDefaults:
    """A checkpoint's generation config as lp follows it: provides the sampling settings that a caller leaves open.

    Attributes:
        config: copy of the generation config, without the fields listed in `left`.
        says: values of the fields that change scores, by field name; also `do_sample`, if it is true.
        left: fields that would change tokens but that lp refuses: the reason for each, by field name.
    """

    config: GenerationConfig
    says: dict[str, Any]
    left: dict[str, str]

    @classmethod
    def of(cls, config: GenerationConfig) -> CheckpointDefaults:
        """Build a CheckpointDefaults from a model's generation config.

        If the config asks for sampling and sets no `top_k`, transformers' default of 50 applies.
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
        """Whether the checkpoint asks for sampling (`do_sample`); used if a caller gives no sampling settings."""
        return bool(self.config.do_sample)

    @property
    def sampling(self) -> dict[str, Any]:
        """Values of the checkpoint's settings that `SamplingParams` has fields for, such as temperature, by name."""
        return {name: self.says[name] for name in SAMPLED if name in self.says}

    def said(self, sampling: SamplingParams | None) -> dict[str, Any]:
        """List the checkpoint's settings that still apply once a caller's sampling settings have overridden others.

        For greedy decoding, warpers such as top_p are left out.

        Args:
            sampling: the caller's sampling settings; they override every field of the checkpoint that `SamplingParams`
                has. None: the caller gave none, so all of the checkpoint's settings apply.

        Returns:
            Values of the settings, by name.
        """
        overridden = set() if sampling is None else {"do_sample", *SAMPLED}
        if not (self.samples if sampling is None else sampling.temperature):
            overridden |= {*WARPERS}  # greedy
        return {name: value for name, value in self.says.items() if name not in overridden}

    def line(self, sampling: SamplingParams | None) -> str:
        """Tell the user in one line which settings of the checkpoint apply and which lp refuses; "" if there are none.

        Args:
            sampling: the caller's sampling settings; they override every field of the checkpoint that `SamplingParams`
                has. None: the caller gave none, so all of the checkpoint's settings apply.
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
        """Determine how a sequence is sampled, and all its logits processors in order, warpers included.

        Args:
            sampling: the caller's sampling settings; they override every field of the checkpoint that `SamplingParams`
                has. None: the checkpoint's settings apply.
            processors: the caller's logits processors. Each replaces the checkpoint's processor of the same class, if
                there is one.
            model_config: the model's own config.
            padding: number of left padding tokens before the prompt.
            length: number of tokens of the prompt, padding included.
            max_length: most tokens that the sequence may have, padding and prompt included.
            eos: token ids that end the sequence.
            device: where processors hold their tensors.

        Returns:
            (sampling, processors). The sampling holds only a seed and a verifier, since all other settings are among
            the processors; it is None for greedy decoding.

        Raises:
            ValueError: the checkpoint's config has a value that transformers does not accept.
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
    """Adapt a logits processor that transformers made for a whole batch, so that it works for one prompt of the batch.

    Only the repetition penalty is changed: its `prompt_ignore_length` may hold one number for each prompt.

    Args:
        processor: the processor that transformers made.
        index: index of the prompt in the batch, from 0.
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
