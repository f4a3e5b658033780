"""The probe: check on a model itself, with a few tokens, that its decode steps honour a tree mask.

Two branches of DEPTH tokens follow the last token of a short sequence. One step that computes both branches, as a tree
of nodes, must give what plain causal passes over each branch give. So must a step after one branch has been committed,
that is, added to the cached prefix.

1. The whole model runs such a step of three tokens in its own dtype: it must run, with finite logits.
2. The result is judged on an excerpt, a few layers of the model in float32 (`lp.models.float32_excerpt`). The largest
   error that is allowed lies between two effects that are measured on the excerpt: the effect of rounding, and the
   effect of one node that sees one token too many, sees one too few, or has another position.
3. In the dtype of the model, the attention kernel is compared with exact attention over the same tensors, and fused
   layers with the excerpt (`lp.models.own_dtype`).

B: branches, T: nodes, E: hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
from transformers import PreTrainedModel

from lp.draft.layout import ancestors
from lp.errors import UserError
from lp.models.float32_excerpt import PRECISE, Excerpt
from lp.models.kv_cache import CacheTooLarge
from lp.models.model_lock import lock_of
from lp.models.own_dtype import fault_in_own_dtype
from lp.models.probe_step import (
    BRANCHES,
    DEPTH,
    PARENTS,
    PREFIX,
    Fault,
    StepRunner,
    Trial,
    planted,
    positions_of,
    relative_error,
    tokens_of,
)
from lp.models.support import float32_precision
from lp.sampling.sampler import NOT_FINITE_REMEDY

logger = logging.getLogger(__name__)
# Rounding is made visible by embeddings that are off by as many roundings. A sum in float32 is rounded after every
# addition, in other dtypes once.
ROUNDINGS = {True: 8, False: 4}  # whether the arithmetic is float32's
INT8 = 2.0**-8  # relative, of activations rounded to 8 bits
SHOWS = 16  # times the effect of rounding: a smaller fault tells nothing; a right step may be off by the root of 16
PLANTED = (2, 4, 6)  # nodes with a planted fault, one at a time
FEW = 3  # nodes of the whole model's step
CPU_IS_FULL = "can't allocate memory"  # in the RuntimeError of torch's CPU allocator
_MARK = "_lp_honours_tree_mask"  # attribute of the model: the ways of running steps that passed `check_tree_mask`


@dataclass(frozen=True)
class Findings:
    """Result of the probe: how a tree-shaped step of an excerpt (a few layers of a model) compares with plain passes.

    Faults, such as a wrong mask at one node, are planted in the step to see whether the comparison would notice them.
    Errors and effects are differences of outputs, relative to the standard deviation of the outputs.

    Attributes:
        error: the largest error of a node of the tree, without a planted fault.
        noise: the effect of rounding.
        faults: every planted fault, with its effect on the output of its node.
        own_dtype: what is off in the model's own dtype, in words; None: nothing is.
    """

    error: float
    noise: float
    faults: list[tuple[Fault, float]]
    own_dtype: str | None = None

    @property
    def limit(self) -> float:
        """The largest error that passes: the geometric mean of the effect of rounding and that of the smallest fault.

        Faults, such as a wrong mask at one node, are planted to measure their effects. Only faults whose effect stands
        out from rounding count. If there are none, 16 times the effect of rounding takes the place of the smallest
        fault's.
        """
        return sqrt(self.noise * max(self.fault, SHOWS * self.noise))

    @property
    def fault(self) -> float:
        """Effect of the smallest planted fault that stands out from rounding, relative to the outputs' spread.

        Faults, such as a wrong mask at one node, are planted to measure their effects. If none stands out, the result
        is 0.
        """
        return min([effect for _, effect in self.faults if effect > SHOWS * self.noise], default=0.0)

    @property
    def blind(self) -> bool:
        """Whether rounding hides the effects of all planted faults, such as a wrong mask at one node.

        Then the probe would not notice such a fault in the model.
        """
        return self.fault == 0

    @property
    def failure(self) -> str | None:
        """Why the model fails the probe, such as "does not honour a tree mask: ..."; None: the model passes."""
        if self.error <= self.limit:
            return self.own_dtype
        return (
            f"does not honour a tree mask: a tree-shaped step is off by {self.error:.2g} of the spread of its results"
        )


def check_tree_mask(runner: StepRunner) -> None:
    """Refuse a model that does not honour a tree mask: its tree-shaped step differs from plain forward passes.

    A model is checked once for each way in which its steps run: attention backend, captured or not, fused layers or
    not, dtype and type of device.

    Args:
        runner: the model's runner.

    Raises:
        ValueError: the model cannot run such a step, or its results differ; names the architecture and the remedy.
        OutOfMemoryError: the device is full, which says nothing about the model.
    """
    with lock_of(runner.original):
        passed = vars(runner.original).setdefault(_MARK, set())
        dtype = str(runner.original.dtype).removeprefix("torch.")  # a cast or moved model runs other kernels
        how = (runner.backend.name, runner.captured is not None, runner.fused, dtype, runner.device.type)
        if how in passed:
            return
        with torch.inference_mode():
            _check_runs(runner)
            found = probed(runner)
        if found.failure is None:
            if found.blind and runner.exact:  # else it is known to differ
                logger.warning(
                    "%s: rounding hides what one token changes that a node must not see, so only a mask that is wrong "
                    "at many nodes would be noticed; compare a few texts with AutoregressiveDecoder",
                    _name(runner),
                )
            passed.add(how)
            return
    raise UserError(f"{_name(runner)} {found.failure}; {_remedy(runner)}")


def _check_runs(runner: StepRunner) -> None:
    """Let the whole model run a tree-shaped step.

    Raises:
        ValueError: it cannot, or its logits are not finite.
    """
    nodes = tokens_of(runner.model)[-FEW:]
    visible = ancestors(PARENTS[:FEW])
    positions = positions_of(visible, 0)
    with _named(runner):
        logits = runner.forward(nodes, positions, visible, runner.new_cache(len(nodes)), range(len(nodes)))
    if not logits.isfinite().all():
        raise UserError(f"{_name(runner)} gives logits that are NaN or infinite; {NOT_FINITE_REMEDY}")


def probed(runner: StepRunner, nodes: Sequence[int] = PLANTED) -> Findings:
    """Compare a tree-shaped step with plain passes on an excerpt (a few layers) of the model, without refusing it.

    The excerpt is in float32, or in the model's dtype if its kernels do not run in float32. If the model's code does
    not run with a few layers, the whole model is compared.

    Args:
        runner: the model's runner.
        nodes: indices of the step's nodes at which faults are planted, to see how large their effects are.

    Raises:
        ValueError: not even the whole model runs such a step.
        OutOfMemoryError: the device is full.
    """
    with _named(runner):
        for in_float32 in (True,) if runner.original.dtype in PRECISE else (True, False):
            try:
                return _findings(runner, nodes, in_float32)
            except (torch.OutOfMemoryError, CacheTooLarge):
                raise
            except Exception as failure:  # of code that nobody here knows
                if CPU_IS_FULL in str(failure):
                    raise torch.OutOfMemoryError(str(failure)) from failure
                reason = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
                how = "in float32" if in_float32 else "by themselves"
                logger.warning(
                    "%s: a few of its layers do not run %s (%s); its mask is checked in its own dtype, where rounding "
                    "may hide a wrong node",
                    _name(runner),
                    how,
                    reason,
                )
        return _findings(runner, nodes, whole=True)


def _findings(runner: StepRunner, nodes_at: Sequence[int], in_float32: bool = True, whole: bool = False) -> Findings:
    """Compare a tree-shaped step with plain passes on an excerpt that is made with these arguments."""
    excerpt = Excerpt(runner.original, in_float32, whole)
    tokens = tokens_of(excerpt.model)
    prefix, nodes = tokens[:PREFIX], tokens[PREFIX:]
    reference, noise = _plain(excerpt, prefix, nodes, _off(runner, excerpt.model))
    trial = Trial(runner.over(excerpt.model), prefix, nodes)
    step = trial.step()
    faults = [(fault, trial.effect(fault, step)) for fault in planted(nodes_at)]
    own_dtype = None
    if excerpt.model.dtype in PRECISE and runner.original.dtype not in PRECISE:
        own_dtype = fault_in_own_dtype(runner, excerpt, trial, step)
    after_commit = trial.after_commit()
    errors = [relative_error(step, reference).max(), relative_error(after_commit, reference[-1:]).max()]
    return Findings(float(torch.stack(errors).max()), noise, faults, own_dtype)


def _plain(excerpt: Excerpt, prefix: list[int], nodes: list[int], off: float) -> tuple[torch.Tensor, float]:
    """What plain passes over both branches give for each node, (T, E), and how far that moves if embeddings are off."""
    model = excerpt.model
    device = model.get_input_embeddings().weight.device
    texts = torch.tensor([prefix + [nodes[node] for node in branch] for branch in BRANCHES], device=device)
    after_prefix = torch.arange(texts.shape[1], device=device)[-DEPTH - 1 :]  # as in a step: see `forward`

    def by_node() -> torch.Tensor:
        outputs = model(texts, use_cache=False, logits_to_keep=after_prefix).logits  # (B, DEPTH + 1, E)
        if outputs.shape[1] > len(after_prefix):
            raise UserError("it gives logits of tokens that logits_to_keep leaves out")
        places = {
            node: place
            for branch, row in zip(BRANCHES, outputs, strict=True)
            for node, place in zip(branch, row, strict=True)
        }
        return torch.stack([places[node] for node in range(len(nodes))])

    exact = by_node()
    with excerpt.perturbed(off):
        perturbed = by_node()
    excerpt.settle()
    return exact, float(relative_error(perturbed, exact).max())


def _off(runner: StepRunner, model: PreTrainedModel) -> float:
    """Relative error of embeddings that shows what rounding does in this model."""
    if not runner.exact:
        return ROUNDINGS[False] * INT8
    if model.dtype in PRECISE:
        return ROUNDINGS[True] * float32_precision() / 2
    return ROUNDINGS[False] * torch.finfo(model.dtype).eps / 2


@contextmanager
def _named(runner: StepRunner) -> Iterator[None]:
    """Name the model and a remedy in what it raises."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except CacheTooLarge as full:
        raise torch.OutOfMemoryError(f"the device is full: {full}") from full
    except Exception as failure:
        reason = str(failure).strip().split("\n")[0]
        raise UserError(
            f"{_name(runner)} cannot run a tree-shaped step ({type(failure).__name__}: {reason}); {_remedy(runner)}"
        ) from failure


def _name(runner: StepRunner) -> str:
    return f"{type(runner.model).__name__} with {runner.backend.name} attention"


def _remedy(runner: StepRunner) -> str:
    remedy = "decode it with AutoregressiveDecoder"
    alternative = runner.backend.alternative
    return f"try attention={alternative}, or {remedy}" if alternative else remedy
