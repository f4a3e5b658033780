"""lp: lookahead decoding and lookahead parallelism for any Hugging Face causal LM (arXiv 2402.02057).

The public names are imported when they are first used: torch and transformers take seconds, and the apps' `--help`
needs neither.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lp.attention.registry import register_attention
    from lp.budget.step_times import StepTimes
    from lp.config import Ablation, Capture, Exact, KVSync, LookaheadConfig, PoolScope
    from lp.draft.jacobi import JacobiConfig
    from lp.draft.paper import PaperConfig
    from lp.draft.prompt_lookup import PromptLookupConfig
    from lp.draft.registry import register_source
    from lp.draft.suffix import SuffixConfig
    from lp.draft.token_recycling import RecyclingConfig
    from lp.engine.autoregressive import AutoregressiveDecoder
    from lp.engine.core import Handle
    from lp.engine.decoder import Decoder
    from lp.engine.engine import Engine
    from lp.engine.interrupts import Interrupted
    from lp.engine.lookahead import LookaheadDecoder
    from lp.engine.output import GenerationOutput, StepStats
    from lp.engine.plain import PlainDecoder
    from lp.errors import UserError
    from lp.integrations.accelerate import accelerate, restore
    from lp.integrations.custom_generate import generate
    from lp.models.loader import load
    from lp.models.runner import release
    from lp.parallel.context import ParallelContext
    from lp.sampling.grammar_compiler import GrammarCompiler
    from lp.sampling.params import SamplingParams, Verifier

__version__ = "0.1.0"  # pyproject.toml takes it from here, so that a clone has it too

__all__ = [
    "Ablation",
    "AutoregressiveDecoder",
    "Capture",
    "Decoder",
    "Engine",
    "Exact",
    "GenerationOutput",
    "GrammarCompiler",
    "Handle",
    "Interrupted",
    "JacobiConfig",
    "KVSync",
    "LookaheadConfig",
    "LookaheadDecoder",
    "PaperConfig",
    "ParallelContext",
    "PlainDecoder",
    "PoolScope",
    "PromptLookupConfig",
    "RecyclingConfig",
    "SamplingParams",
    "StepStats",
    "StepTimes",
    "SuffixConfig",
    "UserError",
    "Verifier",
    "accelerate",
    "generate",
    "load",
    "register_attention",
    "register_source",
    "release",
    "restore",
]

# The public names by the module that has them; a test compares it with the imports above.
_NAMES = {
    "lp.attention.registry": "register_attention",
    "lp.budget.step_times": "StepTimes",
    "lp.config": "Ablation Capture Exact KVSync LookaheadConfig PoolScope",
    "lp.draft.paper": "PaperConfig",
    "lp.draft.prompt_lookup": "PromptLookupConfig",
    "lp.draft.registry": "register_source",
    "lp.draft.suffix": "SuffixConfig",
    "lp.draft.jacobi": "JacobiConfig",
    "lp.draft.token_recycling": "RecyclingConfig",
    "lp.engine.autoregressive": "AutoregressiveDecoder",
    "lp.engine.decoder": "Decoder",
    "lp.engine.engine": "Engine Handle",
    "lp.engine.lookahead": "LookaheadDecoder",
    "lp.engine.output": "GenerationOutput StepStats",
    "lp.engine.plain": "PlainDecoder",
    "lp.engine.interrupts": "Interrupted",
    "lp.errors": "UserError",
    "lp.integrations.accelerate": "accelerate restore",
    "lp.integrations.custom_generate": "generate",
    "lp.models.loader": "load",
    "lp.models.runner": "release",
    "lp.parallel.context": "ParallelContext",
    "lp.sampling.grammar_compiler": "GrammarCompiler",
    "lp.sampling.params": "SamplingParams Verifier",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def _worth_saying(record: logging.LogRecord) -> bool:
    """Drop torch's warnings about torchao's code, which transformers imports for every model if it is installed."""
    said_of = record.args if isinstance(record.args, tuple) else ()
    return not any(str(getattr(value, "__module__", "")).startswith("torchao.") for value in said_of)


def _may_be_missed(record: logging.LogRecord) -> bool:
    """Drop torchao's warning that its GPU kernels can't be loaded, if this torch has no CUDA."""
    import torch  # torchao has it

    return torch.version.cuda is not None or not str(record.msg).startswith("Failed to load ")


logging.getLogger("torch.utils._pytree").addFilter(_worth_saying)
logging.getLogger("torchao").addFilter(_may_be_missed)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
