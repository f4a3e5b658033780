"""lp: lookahead decoding and lookahead parallelism for any Hugging Face causal LM (arXiv 2402.02057)."""

from lp.budget.step_times import StepTimes
from lp.config import (
    Capture,
    KVSync,
    LookaheadConfig,
    PaperConfig,
    PoolScope,
    PromptLookupConfig,
    RecyclingConfig,
    SuffixConfig,
)
from lp.engine.autoregressive import AutoregressiveDecoder
from lp.engine.decoder import Decoder
from lp.engine.lookahead import LookaheadDecoder, PaperDecoder, PromptLookupDecoder, RecyclingDecoder, SuffixDecoder
from lp.engine.output import GenerationOutput, StepStats
from lp.engine.signals import Interrupted
from lp.integrations.custom_generate import generate
from lp.parallel.context import ParallelContext
from lp.sampling.params import SamplingParams, Verifier

__all__ = [
    "AutoregressiveDecoder",
    "Capture",
    "Decoder",
    "GenerationOutput",
    "Interrupted",
    "KVSync",
    "LookaheadConfig",
    "LookaheadDecoder",
    "PaperConfig",
    "PaperDecoder",
    "ParallelContext",
    "PoolScope",
    "PromptLookupConfig",
    "PromptLookupDecoder",
    "RecyclingConfig",
    "RecyclingDecoder",
    "SamplingParams",
    "StepStats",
    "StepTimes",
    "SuffixConfig",
    "SuffixDecoder",
    "Verifier",
    "generate",
]
