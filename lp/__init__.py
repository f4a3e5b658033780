"""lp: lookahead decoding and lookahead parallelism for any Hugging Face causal LM (arXiv 2402.02057)."""

from lp.config import (
    Attention,
    Capture,
    KVSync,
    LookaheadConfig,
    PaperConfig,
    PoolScope,
    PromptLookupConfig,
    RecyclingConfig,
    SuffixConfig,
)
from lp.decoding.autoregressive import AutoregressiveDecoder
from lp.decoding.base import Decoder, GenerationOutput, StepStats
from lp.decoding.hf import generate
from lp.decoding.lookahead import LookaheadDecoder, PaperDecoder, PromptLookupDecoder, RecyclingDecoder, SuffixDecoder
from lp.decoding.params import SamplingParams, Verifier
from lp.decoding.signals import Interrupted
from lp.distributed import ParallelContext
from lp.tuner.curve import StepCurve

__all__ = [
    "Attention",
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
    "StepCurve",
    "StepStats",
    "SuffixConfig",
    "SuffixDecoder",
    "Verifier",
    "generate",
]
