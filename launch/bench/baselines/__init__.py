"""Other people's ways to run a model, behind the interface of our decoders, to be measured beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from lp.engine.autoregressive import AutoregressiveDecoder
from lp.engine.decoder import Decoder
from lp.parallel.context import ParallelContext

from .accelerate_pp import pipelined
from .deepspeed_tp import deepspeed_shard
from .hf_generate import HFGenerateDecoder, load_draft
from .transformers_tp import transformers_shard


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineOptions:
    """What a baseline may be told.

    Args:
        draft: model that drafts for `hf_assisted`: a folder, a hub name, or "demo".
        num_tokens: tokens that `hf_prompt_lookup` copies a step.
    """

    draft: str | None = None
    num_tokens: int = 10


class Build(Protocol):
    """Makes a baseline's decoder."""

    def __call__(self, model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
        """From the model, the ranks and the options."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """How a baseline is made, and whether the ranks run it together; one that they do not is rank 0's alone.

    Args:
        build: from the model, the ranks and the options; every rank of `together` calls it.
        together: whether it needs all ranks.
    """

    build: Build
    together: bool = False


def _hf(cache: str) -> Build:
    return lambda model, context, options: HFGenerateDecoder(model, cache=cache)


def _prompt_lookup(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    return HFGenerateDecoder(model, prompt_lookup=options.num_tokens)


def _assisted(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    return HFGenerateDecoder(model, draft=load_draft(options.draft, model))


def _pipeline(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    return AutoregressiveDecoder(pipelined(model))


def _deepspeed(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    return AutoregressiveDecoder(deepspeed_shard(model, context), context)


def _transformers(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    return AutoregressiveDecoder(transformers_shard(model, context), context)


BASELINES: Mapping[str, Baseline] = {
    "hf_generate": Baseline(build=_hf("dynamic")),
    "hf_static": Baseline(build=_hf("static")),
    "hf_prompt_lookup": Baseline(build=_prompt_lookup),
    "hf_assisted": Baseline(build=_assisted),
    "deepspeed_tp": Baseline(build=_deepspeed, together=True),
    "transformers_tp": Baseline(build=_transformers, together=True),
    "accelerate_pp": Baseline(build=_pipeline),
}
