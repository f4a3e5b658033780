"""Other implementations behind the interface of our decoders, to be measured beside them.

A baseline is one module that decorates a function with `register_baseline("name")`, and its line in the import below.
"""

from __future__ import annotations

from . import accelerate_pp, deepspeed_tp, hf_generate, llama_cpp, transformers_tp  # noqa: F401  # each registers its own
from .registry import BASELINES, Baseline, BaselineOptions, Build, register_baseline

__all__ = ["BASELINES", "Baseline", "BaselineOptions", "Build", "register_baseline"]
