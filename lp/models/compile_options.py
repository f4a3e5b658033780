"""What torch.compile is given for a captured step, as far as this release of torch knows it."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def compile_options() -> dict[str, Any]:
    """Keyword arguments of torch.compile for one step of one fixed shape.

    Every bucket of every model is a compilation of its own, or torch would take one for a change of another and stop
    compiling after a few. Where torch does not know `isolate_recompiles` (before 2.13, not in all releases), the limit
    of `torch._dynamo.config.recompile_limit` compilations holds for all of them together.
    """
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    return options
