"""lp: lookahead decoding and lookahead parallelism for any Hugging Face causal LM (arXiv 2402.02057)."""

from lp.budget.step_times import StepTimes
from lp.config import Attention, Capture, KVSync, LookaheadConfig, PoolScope
from lp.draft.paper import PaperConfig
from lp.draft.prompt_lookup import PromptLookupConfig
from lp.draft.registry import register_source
from lp.draft.suffix import SuffixConfig
from lp.draft.token_recycling import RecyclingConfig
from lp.engine.autoregressive import AutoregressiveDecoder
from lp.engine.decoder import Decoder
from lp.engine.lookahead import LookaheadDecoder
from lp.engine.output import GenerationOutput, StepStats
from lp.engine.signals import Interrupted
from lp.integrations.custom_generate import generate
from lp.parallel.context import ParallelContext
from lp.sampling.params import SamplingParams, Verifier

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
    "ParallelContext",
    "PoolScope",
    "PromptLookupConfig",
    "RecyclingConfig",
    "SamplingParams",
    "StepStats",
    "StepTimes",
    "SuffixConfig",
    "Verifier",
    "generate",
    "register_source",
]
