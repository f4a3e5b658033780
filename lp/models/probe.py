"""The probe: checks on a model itself, with a few tokens, that it honours a tree mask.

Two branches of DEPTH tokens follow the last token `c` of a text. One tree-shaped step must give the logits that plain
causal forward passes of each branch give, and so must a step after a commit.

B: branches, V: vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lp.attention.base import AttentionBackend
from lp.draft.layout import ancestors
from lp.errors import UserError
from lp.models.captured_steps import CapturedSteps
from lp.models.kv_cache import CacheTooLarge, StaticKVCache
from lp.models.model_lock import lock_of
from lp.models.recurrent_layers import NO_LIMIT
from lp.models.vocabulary import embedded_tokens
from lp.sampling.sampler import NOT_FINITE_REMEDY

PREFIX = 10  # tokens before `c`
DEPTH = 3  # tokens of a branch
SHORT_WINDOW = 6  # tokens; below PREFIX, so that no token of the step sees the start of the text
# Nodes: `c`, then the branches in turn, so that under a mask by order alone the branches see each other.
PARENTS = [-1, 0, 0, 1, 2, 3, 4]
BRANCHES = [[0, 1, 3, 5], [0, 2, 4, 6]]
# Limits of the mean relative error of the logits. Measured on models of 6 and 32 layers: 1e-6 in float32, 0.003 in
# float16, 0.02 in bfloat16; a branch that sees another has 0.04 to 0.07 with weights as initialised and 0.2 to 0.5 with
# sharper ones.
TOLERANCE = {torch.bfloat16: 0.06, torch.float16: 0.02}
FULL_PRECISION = 2e-3  # TF32 matmuls included
_MARK = "_lp_honours_tree_mask"  # attribute of the model: what it passed with, as `check_tree_mask` names it


class StepRunner(Protocol):
    """What the probe needs of a model runner; see `lp.models.runner.ModelRunner` for the attributes and methods."""

    original: PreTrainedModel
    model: PreTrainedModel
    config: PretrainedConfig
    device: torch.device
    backend: AttentionBackend
    captured: CapturedSteps | None
    exact: bool

    @property
    def fused(self) -> bool: ...

    def new_cache(self, capacity: int) -> StaticKVCache: ...

    def prefill(self, tokens: Sequence[int], cache: StaticKVCache, chunk: int) -> None: ...

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        visible: np.ndarray,
        cache: StaticKVCache,
        logits_indices: Sequence[int],
    ) -> torch.Tensor: ...


def check_tree_mask(runner: StepRunner) -> None:
    """Compare a tree-shaped step with plain forward passes; once for each way that a model's steps run.

    Where the model has a sliding window, the runner's view of it has a short one meanwhile: the same code runs with 24
    tokens, whatever the window. And the time steps of Mamba-2 have no limits, which hold for some tokens alone.

    Raises:
        ValueError: the model cannot run such a step, or runs it with other results; names the architecture.
        OutOfMemoryError: the device is full, which says nothing about the model.
    """
    with lock_of(runner.original):
        passed = vars(runner.original).setdefault(_MARK, set())
        how = (runner.backend.name, runner.captured is not None, runner.fused)
        if how in passed:
            return
        with torch.inference_mode(), _short_window(runner), _no_limits(runner):
            error = _mean_error(runner)
        dtype = runner.model.dtype if runner.exact else torch.bfloat16  # activations rounded to 8 bits are as coarse
        if error <= TOLERANCE.get(dtype, FULL_PRECISION):
            passed.add(how)
            return
    raise UserError(
        f"{_name(runner)} does not honour a tree mask: logits of a tree-shaped step are off by "
        f"{error:.2g} of their spread; {_remedy(runner)}"
    )


def _mean_error(runner: StepRunner) -> float:
    """Of the tree's logits and of the step after the commit, against plain forward passes."""
    vocabulary = embedded_tokens(runner.model)
    # From the middle of the vocabulary: special tokens lie at its ends.
    ids = [vocabulary // 4 + 37 * i % max(vocabulary // 2, 1) for i in range(PREFIX + len(PARENTS))]
    prefix = ids[:PREFIX]
    nodes = ids[PREFIX:]
    texts = torch.tensor([prefix + [nodes[node] for node in branch] for branch in BRANCHES], device=runner.device)
    behind_prefix = torch.arange(texts.shape[1], device=runner.device)[-DEPTH - 1 :]  # as in a step: see `forward`
    tree_logits = None
    try:
        plain_logits = runner.model(texts, use_cache=False, logits_to_keep=behind_prefix).logits  # (B, DEPTH + 1, V)
        if plain_logits.isfinite().all():
            tree_logits = _tree_logits(runner, prefix, nodes)
    except torch.OutOfMemoryError:
        raise
    except CacheTooLarge as full:
        raise torch.OutOfMemoryError(f"the device is full: {full}") from full
    except Exception as failure:
        reason = str(failure).strip().split("\n")[0]
        raise UserError(
            f"{_name(runner)} cannot run a tree-shaped step ({type(failure).__name__}: {reason}); {_remedy(runner)}"
        ) from failure
    if tree_logits is None:
        raise UserError(f"{_name(runner)} gives logits that are NaN or infinite; {NOT_FINITE_REMEDY}")
    errors = [
        _relative_error(tree_logits[node], plain_logits[index, depth])
        for index, branch in enumerate(BRANCHES)
        for depth, node in enumerate(branch)
    ]
    errors.append(_relative_error(tree_logits[-1], plain_logits[1, -1]))
    return float(torch.stack(errors).mean())


def _tree_logits(runner: StepRunner, prefix: list[int], nodes: list[int]) -> torch.Tensor:
    """Logits of the tree's nodes, then of the last one again in a step of its own: (nodes + 1, V)."""
    cache = runner.new_cache(PREFIX + len(nodes))
    runner.prefill(prefix, cache, PREFIX)
    visible = ancestors(PARENTS)
    positions = [PREFIX + int(row.sum()) - 1 for row in visible]
    tree = runner.forward(nodes, positions, visible, cache, range(len(nodes)))
    cache.commit(BRANCHES[1][:-1])
    after_commit = runner.forward(nodes[-1:], positions[-1:], visible[:1, :1], cache, [0])
    return torch.cat([tree, after_commit])


def _relative_error(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Root mean square of the difference by the reference's spread, which is 0 where all tokens are equally likely."""
    spread = reference.double().std()
    difference = (logits.double() - reference.double()).square().mean().sqrt()
    return difference / torch.where(spread > 0, spread, 1.0)


@contextmanager
def _short_window(runner: StepRunner) -> Iterator[None]:
    window = getattr(runner.config, "sliding_window", None)
    if window is None or window <= SHORT_WINDOW:
        yield
        return
    modules: list[nn.Module] = [m for m in runner.model.modules() if getattr(m, "sliding_window", None) == window]
    holders: list[Any] = [runner.config, *modules]
    try:
        for holder in holders:
            holder.sliding_window = SHORT_WINDOW
        yield
    finally:
        for holder in holders:
            holder.sliding_window = window


@contextmanager
def _no_limits(runner: StepRunner) -> Iterator[None]:
    limited: list[Any] = [module for module in runner.model.modules() if hasattr(module, "time_step_limit")]
    limits = [module.time_step_limit for module in limited]
    try:
        for module in limited:
            module.time_step_limit = NO_LIMIT
        yield
    finally:
        for module, limit in zip(limited, limits, strict=True):
            module.time_step_limit = limit


def _name(runner: StepRunner) -> str:
    return f"{type(runner.model).__name__} with {runner.backend.name} attention"


def _remedy(runner: StepRunner) -> str:
    remedy = "decode it with AutoregressiveDecoder"
    alternative = runner.backend.alternative
    return f"try attention={alternative}, or {remedy}" if alternative else remedy
