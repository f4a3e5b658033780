"""lp: lookahead decoding and lookahead parallelism for any Hugging Face causal LM (arXiv 2402.02057)."""

from lp.config import Attention, KVSync, LookaheadConfig, PromptLookupConfig, SuffixConfig
from lp.decoding.autoregressive import AutoregressiveDecoder
from lp.decoding.base import Decoder, GenerationOutput, StepStats
from lp.decoding.hf import generate
from lp.decoding.lookahead import LookaheadDecoder, PromptLookupDecoder, SuffixDecoder
from lp.decoding.sampling import SamplingParams, Verifier
from lp.distributed import ParallelContext

__all__ = [
    "Attention",
    "AutoregressiveDecoder",
    "Decoder",
    "GenerationOutput",
    "KVSync",
    "LookaheadConfig",
    "LookaheadDecoder",
    "ParallelContext",
    "PromptLookupConfig",
    "PromptLookupDecoder",
    "SamplingParams",
    "StepStats",
    "SuffixConfig",
    "SuffixDecoder",
    "Verifier",
    "generate",
]
