"""torch.compile for a captured step, which every release of torch keeps apart from others."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch


def compiled_by_itself(function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A function that defines one step of one fixed shape, compiled.

    Every bucket of every model is such a function, of the same lines. Torch takes those for one that has changed, and
    stops compiling it after 8 times, or as many as `torch._dynamo.config.recompile_limit` says: unless each has a code
    object of its own, since torch keeps what it compiled by these.
    """
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace()
    return torch.compile(function, fullgraph=True, dynamic=False)
