"""Baselines by transformers' own `generate`, with its loops, caches and drafts, wrapped as lp decoders.

The prompt without its last token is prefilled before `generate` begins, as in lp, so that steps and times are
comparable.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from packaging.version import Version
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput, StepStats, StepTimer
from lp.engine.request import Request
from lp.engine.stopping import FINISH_REASON
from lp.errors import UserError
from lp.models.loader import load
from lp.models.releases import cache_keyword
from lp.parallel.context import ParallelContext
from lp.parallel.message import Stop
from lp.sampling.generation_config import NONE

from .registry import BaselineOptions, register_baseline


@register_baseline("hf_generate")
def build_dynamic(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    """Build the baseline hf_generate: transformers' `generate` with its default cache, which grows with the text."""
    return HFGenerateDecoder(model)


@register_baseline("hf_static")
def build_static(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    """Build the baseline hf_static: transformers' `generate` with a cache of fixed size.

    With such a cache transformers compiles the decode step on a GPU.
    """
    return HFGenerateDecoder(model, static=True)


def missing_release(options: BaselineOptions) -> str | None:
    """Reason why transformers before 5.18 cannot draft tokens here, with the remedy; None for 5.18 or newer.

    Older releases ask stopping criteria about draft tokens that are not accepted yet.
    """
    if Version(tf.__version__) >= Version("5.18"):
        return None
    return f"needs transformers 5.18 or newer, and {tf.__version__} is installed; upgrade it"


@register_baseline("hf_prompt_lookup", missing=missing_release)
def build_prompt_lookup(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    """Build the baseline hf_prompt_lookup: transformers' `generate` with its own prompt lookup."""
    return HFGenerateDecoder(model, prompt_lookup=options.num_tokens)


def missing_draft(options: BaselineOptions) -> str | None:
    """Reason why the baseline hf_assisted cannot run here, with the remedy; None if it can run.

    It needs a draft model, and transformers 5.18 or newer.
    """
    return missing_release(options) if options.draft else "needs a draft model; give draft=<folder or hub name>"


@register_baseline("hf_assisted", missing=missing_draft)
def build_assisted(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    """Build the baseline hf_assisted: transformers' `generate` with a small model that drafts (assisted generation).

    Raises:
        ValueError: no draft model is given, or its vocabulary is not the model's.
    """
    return HFGenerateDecoder(model, draft=load_draft(options.draft, model))


def load_draft(name: str | None, model: PreTrainedModel) -> PreTrainedModel:
    """Load the draft model for assisted generation, on the device and in the dtype of the model that it drafts for.

    Args:
        name: folder or hub name of the draft model; None raises an error that asks for a draft model.
        model: the model that it drafts for.

    Raises:
        ValueError: no name is given, the draft model cannot be loaded, or its vocabulary size is not the model's.
    """
    if name is None:
        raise UserError("hf_assisted needs a draft model; give draft=<folder or hub name>")
    draft = load(name, str(model.dtype).removeprefix("torch."), model.device).model
    sizes = [each.get_input_embeddings().weight.shape[0] for each in (draft, model)]
    if sizes[0] != sizes[1]:
        raise UserError(f"draft {name!r} embeds {sizes[0]} tokens, the model {sizes[1]}; give one of the same family")
    return draft


class HFGenerateDecoder(Decoder):
    """A decoder that runs transformers' `generate`, on this rank alone.

    Args:
        model: an HF causal LM, loaded and on its device.
        static: use a cache of fixed size. transformers then takes no drafts, and compiles the decode step on a GPU.
        prompt_lookup: most draft tokens that prompt lookup proposes per decode step; None: no prompt lookup.
        draft: a smaller model that drafts tokens; None: no draft model.
    """

    follows = NONE  # a peer is measured on what was asked for

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        static: bool = False,
        prompt_lookup: int | None = None,
        draft: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(model)
        self.static = static
        self.prompt_lookup = prompt_lookup
        self.draft = draft

    def _decode(self, request: Request) -> GenerationOutput:
        timer = StepTimer()
        ids = torch.tensor([request.prompt], device=self.model.device)
        cache = self._prefilled(ids, request)
        prefill_s = timer.restart()
        steps = _Steps(request, timer)
        handle = self.model.register_forward_pre_hook(steps.before_forward, with_kwargs=True) if self._drafts else None
        try:
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{cache_keyword(self.model): cache},
                generation_config=self._config(request),
                # None for bare greedy decoding, which `generate` does itself.
                logits_processor=LogitsProcessorList([] if request.sampler.is_argmax else [_Sampled(request)]),
                stopping_criteria=StoppingCriteriaList([steps]),
                assistant_model=self.draft,
            )
        finally:
            if handle:
                handle.remove()
        decode_s = sum(step.forward_s for step in steps.stats)
        return GenerationOutput(
            steps.tokens[: steps.length], FINISH_REASON[steps.reason], steps.stats, prefill_s, decode_s
        )

    @property
    def _drafts(self) -> bool:
        return self.draft is not None or bool(self.prompt_lookup)

    def _prefilled(self, ids: torch.Tensor, request: Request) -> Cache:
        """A cache with the keys and values of all of the prompt but its last token.

        It is empty where the rotary frequencies depend on the length, so that the prompt must be computed in one pass.
        """
        cache: Cache = DynamicCache(config=self.model.config)
        if self.static:
            cache = StaticCache(config=self.model.config, max_cache_len=len(request.prompt) + request.max_new_tokens)
        if request.boundary is None:
            for part in ids[:, :-1].split(request.prefill_chunk, dim=1):
                if part.shape[1]:
                    self.model(part, use_cache=True, logits_to_keep=1, **{cache_keyword(self.model): cache})
        return cache

    def _config(self, request: Request) -> GenerationConfig:
        """A config that names every field: transformers takes the others from the model's own config."""
        # An id that no token has: the stopping criterion ends the text.
        no_token = self.model.get_input_embeddings().weight.shape[0]
        drafts: dict[str, Any] = {"prompt_lookup_num_tokens": self.prompt_lookup} if self.prompt_lookup else {}
        return GenerationConfig(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=sorted(request.stopping.eos) or no_token,
            pad_token_id=0,
            **drafts,
        )


class _Sampled(LogitsProcessor):
    """Chooses the token that lp's plain decoding samples, by the same logits processors and noise."""

    def __init__(self, request: Request) -> None:
        self.sampler = request.sampler

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        text = input_ids[0].tolist()
        token = self.sampler.sample_last(scores, text)
        chosen = torch.zeros_like(scores)  # finite: prompt lookup copies no token that a processor rules out
        chosen[0, token] = 1.0
        return chosen  # type: ignore[return-value]


class _Steps(StoppingCriteria):
    """Stopping criterion, called once a step: records the step's tokens and time, and ends the text where lp would."""

    def __init__(self, request: Request, timer: StepTimer) -> None:
        self.request = request
        self.timer = timer
        self.tokens: list[int] = []
        self.stats: list[StepStats] = []
        self.reason = Stop.NONE
        self.length = 0  # of the text, without tokens behind its end
        self.num_tokens = 1  # of the current forward pass

    def before_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Count a forward pass' tokens. With drafts the first pass would repeat the cached prompt: cut that off."""
        if not self.stats and self.request.boundary is None:
            cached = len(self.request.prompt) - 1
            names = [name for name in ("input_ids", "position_ids") if kwargs.get(name) is not None]
            kwargs |= {name: kwargs[name][:, cached:] for name in names}
        self.num_tokens = kwargs["input_ids"].shape[1]
        return args, kwargs

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        new = input_ids[0, len(self.request.prompt) + len(self.tokens) :].tolist()
        self.tokens += new
        self.reason, self.length = self.request.stopping.check(self.tokens, len(new))
        if self.request.on_tokens:
            self.request.on_tokens(new[: len(new) - len(self.tokens) + self.length], len(self.stats))
        if not self.reason and self.request.signals.requested:
            self.reason = Stop.INTERRUPTED
        seconds = self.timer.restart()
        self.stats.append(StepStats(self.num_tokens, self.num_tokens - 1, len(new) - 1, seconds, 0.0, 0.0))
        return torch.tensor([bool(self.reason)], device=input_ids.device)  # type: ignore[return-value]
