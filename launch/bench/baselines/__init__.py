"""Other libraries' decoding, wrapped as lp decoders, so that a benchmark can measure it beside lp's own.

To add a baseline, write a module that decorates its build function with `register_baseline("name")`, and import that
module in this file.
"""

from __future__ import annotations

from . import accelerate_pp, deepspeed_tp, hf_generate, llama_cpp, transformers_tp  # noqa: F401  # each registers its own
from .registry import BASELINES, Baseline, BaselineOptions, Build, register_baseline

__all__ = ["BASELINES", "Baseline", "BaselineOptions", "Build", "register_baseline"]
