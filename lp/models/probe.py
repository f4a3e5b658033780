"""Does this very model honour a tree mask? Asked of the model itself, once, on a few rows.

P: rows of the prefix. Two branches of DEPTH tokens hang behind the last token `c` of a text; one tree-shaped step must
give the logits that plain causal forwards of each branch give, and so must a step after a commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lp.draft.layout import ancestors
from lp.errors import UserError
from lp.sampling.sampler import NOT_FINITE_REMEDY

if TYPE_CHECKING:
    from lp.models.runner import ModelRunner

PREFIX, DEPTH = 10, 3  # tokens
SHORT_WINDOW = 6  # tokens; below PREFIX, so that every row of the step has lost sight of the text's start
# Nodes: `c`, then the branches in turn, so that a mask by order alone lets each one see the other.
PARENTS = [-1, 0, 0, 1, 2, 3, 4]
BRANCHES = [[0, 1, 3, 5], [0, 2, 4, 6]]
# Mean over rows of the relative error of their logits. Measured on models of 6 and 32 layers: 1e-6 in float32, 0.003 in
# float16, 0.02 in bfloat16; a branch that sees another has 0.04 to 0.07 with weights as initialised and 0.2 to 0.5 with
# sharper ones.
TOLERANCE = {torch.bfloat16: 0.06, torch.float16: 0.02}
FULL_PRECISION = 2e-3  # TF32 matmuls included
_MARK = "_lp_honours_tree_mask"  # on the model: the attention backends it passed with
_LOCK = Lock()  # ranks that are threads share a model


def check_tree_mask(runner: ModelRunner) -> None:
    """Compare a tree-shaped step with plain forwards; a model that passed is not asked again.

    Where the model has a sliding window, the runner's view of it has a short one meanwhile: the same code is run at 24
    rows, whatever the window.

    Raises:
        ValueError: the model cannot run such a step, or runs it with other results; names the architecture.
    """
    with _LOCK:
        passed = vars(runner.original).setdefault(_MARK, set())
        asked = str(runner.attention) + " captured" * (runner.captured is not None)
        if asked in passed:
            return
        with torch.inference_mode(), _short_window(runner):
            error = _error(runner)
        dtype = runner.model.dtype if runner.exact else torch.bfloat16  # activations rounded to 8 bits are as coarse
        if error <= TOLERANCE.get(dtype, FULL_PRECISION):
            passed.add(asked)
            return
    raise UserError(
        f"{_name(runner)} does not honour a tree mask: logits of a tree-shaped step are off by "
        f"{error:.2g} of their spread; {_remedy(runner)}"
    )


def _error(runner: ModelRunner) -> float:
    vocabulary = runner.model.get_input_embeddings().weight.shape[0]
    # From the middle of the vocabulary: special tokens lie at its ends.
    ids = [vocabulary // 4 + 37 * i % max(vocabulary // 2, 1) for i in range(PREFIX + len(PARENTS))]
    prefix, nodes = ids[:PREFIX], ids[PREFIX:]
    plain = torch.tensor([prefix + [nodes[node] for node in branch] for branch in BRANCHES], device=runner.device)
    try:
        truth = runner.model(plain, use_cache=False, logits_to_keep=DEPTH + 1).logits  # (2, DEPTH + 1, V)
        said = _step(runner, prefix, nodes) if truth.isfinite().all() else None
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        reason = str(failure).strip().split("\n")[0]
        raise UserError(
            f"{_name(runner)} cannot run a tree-shaped step ({type(failure).__name__}: {reason}); {_remedy(runner)}"
        ) from failure
    if said is None:
        raise UserError(f"{_name(runner)} gives logits that are NaN or infinite; {NOT_FINITE_REMEDY}")
    errors = [_relative(said[node], truth[b, d]) for b, branch in enumerate(BRANCHES) for d, node in enumerate(branch)]
    return float(torch.stack([*errors, _relative(said[-1], truth[1, -1])]).mean())


def _step(runner: ModelRunner, prefix: list[int], nodes: list[int]) -> torch.Tensor:
    """Logits of the tree's nodes, then of the last one again in a step of its own: (nodes + 1, V)."""
    cache = runner.new_cache(PREFIX + len(nodes))
    runner.prefill(prefix, cache, PREFIX)
    visible = ancestors(PARENTS)
    positions = [PREFIX + int(row.sum()) - 1 for row in visible]
    tree = runner.forward(nodes, positions, visible, cache, range(len(nodes)))
    cache.commit(BRANCHES[1][:-1])
    again = runner.forward(nodes[-1:], positions[-1:], visible[:1, :1], cache, [0])
    return torch.cat([tree, again])


def _relative(said: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Root mean square of the difference by that of the truth's spread; a model may say the same of every token."""
    spread = truth.double().std()
    return (said.double() - truth.double()).square().mean().sqrt() / torch.where(spread > 0, spread, 1.0)


@contextmanager
def _short_window(runner: ModelRunner) -> Iterator[None]:
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


def _name(runner: ModelRunner) -> str:
    return f"{type(runner.model).__name__} with {runner.attention} attention"


def _remedy(runner: ModelRunner) -> str:
    others = {"flash": "try attention=sdpa, or ", "eager": ""}
    other = others.get(runner.attention, "try attention=eager, or ")
    return f"{other}decode it with AutoregressiveDecoder"
