"""Other implementations behind the interface of lp's decoders, to be measured beside them.

To add a baseline, write a module that decorates its build function with `register_baseline("name")`, and import it
below.
"""

from __future__ import annotations

from . import accelerate_pp, deepspeed_tp, hf_generate, llama_cpp, transformers_tp  # noqa: F401  # each registers its own
from .registry import BASELINES, Baseline, BaselineOptions, Build, register_baseline

__all__ = ["BASELINES", "Baseline", "BaselineOptions", "Build", "register_baseline"]
