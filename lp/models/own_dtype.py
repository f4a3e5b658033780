"""The probe's checks in a model's own dtype, where rounding hides a wrong mask but not a wrong kernel.

The probe runs a tree-shaped step on the model to see whether tree masks are honoured. In float32, it does so on an
excerpt, a few layers of the model. In the model's own dtype it compares

- the attention kernel with exact attention over the same tensors, in one layer of each kind. The kernel may be off by a
  few times the error that plain matrix products have in that dtype.
- fused layers with the excerpt in float32. They may be off by a few times the error of the model's own layers, which
  round in the same places. The median over all nodes counts, as a router may choose another expert for one of them.
"""

from __future__ import annotations

import torch

from lp.attention.rounding_check import Call, recorded
from lp.models.float32_excerpt import Excerpt
from lp.models.probe_step import StepRunner, Trial, relative_error

EAGER = "eager"  # transformers' own products: there is no kernel
FUSED_SLACK = 4  # times the rounding of the model's own layers that fused ones may have: as a kernel's


def fault_in_own_dtype(runner: StepRunner, excerpt: Excerpt, trial: Trial, step: torch.Tensor) -> str | None:
    """Check that the attention kernel and fused layers are right in the model's own dtype, up to rounding.

    Args:
        runner: the model's runner.
        excerpt: a few layers of the model in float32, to compare with.
        trial: runs the probe's tree-shaped step on that excerpt.
        step: outputs of that step, (T, E), T nodes of hidden size E.

    Returns:
        What is off by more than rounding explains, in the words of an error; None: nothing is.
    """
    own = Excerpt(runner.original, in_float32=False, form=excerpt.form)
    tried = Trial(runner.over(own.model), trial.prefix, trial.nodes)
    ours, calls = _step_and_calls(tried)
    dtype = str(runner.original.dtype).removeprefix("torch.")
    if calls and all(error <= limit for error, limit in _errors(trial, _step_and_calls(trial)[1])):
        error, limit = max(_errors(trial, calls), key=lambda pair: pair[0] / pair[1])
        if not error <= limit:
            return f"computes attention in {dtype} that is off by {error:.2g}, where rounding makes up to {limit:.1g}"
    if tried.runner.fused:
        theirs = Trial(runner.over(own.model, fused=False), trial.prefix, trial.nodes).step()
        error, rounding = (float(relative_error(each, step).median()) for each in (ours, theirs))
        if not error <= FUSED_SLACK * rounding:
            return (
                f"has fused layers that are off by {error:.2g} in {dtype}, where its own ones are off by {rounding:.2g}"
            )
    return None


def _step_and_calls(trial: Trial) -> tuple[torch.Tensor, list[Call]]:
    """A step, and what attention was given in it."""
    implementation = trial.runner.backend.implementation
    if implementation == EAGER:
        return trial.step(), []
    with recorded(trial.runner.model, implementation) as calls:
        return trial.step(), calls


def _errors(trial: Trial, calls: list[Call]) -> list[tuple[float, float]]:
    """Error and limit of each recorded call. A function that fails in float32 computes more than attention alone."""
    return [call.errors(trial.visible_keys(call.layer)) for call in calls]
