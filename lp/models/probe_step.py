"""The steps that the probe (the check that a model honours tree masks) runs, as they are and with a planted fault.

A tree-shaped step follows a few cached tokens. T: nodes, N: keys, E: hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from lp.attention.base import AttentionBackend, StepView
from lp.attention.masks import layer_kinds, named_kinds, window_of
from lp.draft.layout import ancestors
from lp.models.captured_steps import CapturedSteps
from lp.models.kv_cache import StaticKVCache
from lp.models.vocabulary import embedded_tokens

PREFIX = 10  # tokens before `c`
DEPTH = 3  # tokens of a branch
# Nodes: `c`, then the branches in turn, so that under a mask by order alone the branches see each other.
PARENTS = [-1, 0, 0, 1, 2, 3, 4]
BRANCHES = [[0, 1, 3, 5], [0, 2, 4, 6]]


class StepRunner(Protocol):
    """The attributes and methods of a model runner that the probe uses, to check that a model honours tree masks.

    `lp.models.runner.ModelRunner` describes them.
    """

    original: PreTrainedModel
    model: PreTrainedModel
    config: PretrainedConfig
    device: torch.device
    backend: AttentionBackend
    captured: CapturedSteps | None
    exact: bool

    @property
    def fused(self) -> bool: ...

    def over(self, model: PreTrainedModel, fused: bool = True) -> StepRunner: ...

    def new_cache(self, capacity: int) -> StaticKVCache: ...

    def prefill(self, tokens: Sequence[int], cache: StaticKVCache, chunk: int) -> None: ...

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        visible: np.ndarray,
        cache: StaticKVCache,
        logits_indices: Sequence[int],
        capture: bool = True,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Fault:
    """An error that is planted in a tree-shaped step, to see by how much it changes the output.

    Attributes:
        kind: "sees one too many", "sees one too few" or "has another position".
        node: index of the node that has the fault.
        visible: bool (T, T); [i, j]: node i of the step sees node j, with the fault.
        positions: positions of the step's nodes, with the fault.
    """

    kind: str
    node: int
    visible: np.ndarray
    positions: list[int]


class Trial:
    """Runs tree-shaped steps on a model, or on a few of its layers, to check that it honours tree masks.

    The steps follow a prefix, which is cached first.

    Args:
        runner: runs passes over the model or its few layers.
        prefix: token ids to cache.
        nodes: token ids of the nodes of a step.
    """

    def __init__(self, runner: StepRunner, prefix: list[int], nodes: list[int]) -> None:
        self.runner = runner
        self.prefix = prefix
        self.nodes = nodes
        self.visible = ancestors(PARENTS)
        self.positions = positions_of(self.visible, len(prefix))
        self.cache = runner.new_cache(len(prefix) + len(nodes))
        runner.prefill(prefix, self.cache, len(prefix))

    def step(self) -> torch.Tensor:
        """Run the tree-shaped step without a fault; returns the outputs of its T nodes, (T, E), E the hidden size."""
        return self._run(self.visible, self.positions, True)

    def visible_keys(self, layer: int) -> torch.Tensor:
        """Which keys the step's nodes see in a layer, bool (T, N): keys of the prefix, then of the step.

        Args:
            layer: index of the layer; in some layers a sliding window hides keys.
        """
        config = self.runner.config
        kind = (named_kinds(config) or [*layer_kinds(config)] * config.num_hidden_layers)[layer]
        device = self.runner.device
        visible_TT = torch.from_numpy(self.visible).to(device)
        positions_T = torch.tensor(self.positions, device=device)
        return StepView(
            visible_TT,
            positions_T,
            self.positions[0],
            None,
            window_of(kind, config),
            self.runner.model.dtype,
        ).visible_TN()

    def effect(self, fault: Fault, step: torch.Tensor) -> float:
        """How far a planted fault moves the output of its node, relative to the standard deviation of that output.

        Args:
            fault: the fault to plant.
            step: outputs of the step without the fault, (T, E).
        """
        faulty = self._run(fault.visible, fault.positions, False)
        node = slice(fault.node, fault.node + 1)
        return float(relative_error(faulty[node], step[node]).max())

    def after_commit(self) -> torch.Tensor:
        """Commit the ancestors of the tree's last node, and compute this node in a step of its own.

        Returns:
            Output of the node, (1, E), E the hidden size.
        """
        self._run(self.visible, self.positions, True)
        self.cache.commit(BRANCHES[1][:-1])
        return self.runner.forward(self.nodes[-1:], self.positions[-1:], self.visible[:1, :1], self.cache, [0]).clone()

    def _run(self, visible: np.ndarray, positions: list[int], capture: bool) -> torch.Tensor:
        every = range(len(self.nodes))
        return self.runner.forward(self.nodes, positions, visible, self.cache, every, capture=capture).clone()


def planted(nodes: Sequence[int]) -> list[Fault]:
    """List the faults that are planted in a tree-shaped step, to see whether the check of tree masks notices them.

    Args:
        nodes: indices of the nodes that get faults: three for each, which sees one node too many, sees one too few, or
            has another position. The faults are planted one at a time.
    """
    faults = []
    visible = ancestors(PARENTS)
    positions = positions_of(visible, PREFIX)
    for node in nodes:
        of_other_branch = next(
            j for j in (node - 1, node + 1, node - 3) if 0 <= j < len(visible) and not visible[node, j]
        )
        for kind, other, sees in (
            ("sees one too many", of_other_branch, True),
            ("sees one too few", PARENTS[node], False),
        ):
            changed = visible.copy()
            changed[node, other] = sees
            faults.append(Fault(kind, node, changed, positions))
        moved = [position + (index == node) for index, position in enumerate(positions)]
        faults.append(Fault("has another position", node, visible, moved))
    return faults


def tokens_of(model: PreTrainedModel) -> list[int]:
    """Choose token ids for the tree-shaped step with which tree masks are checked, and for the prefix before it.

    They are from the middle of the vocabulary, since special tokens lie at its ends.
    """
    vocabulary = embedded_tokens(model)
    return [vocabulary // 4 + 37 * i % max(vocabulary // 2, 1) for i in range(PREFIX + len(PARENTS))]


def positions_of(visible: np.ndarray, start: int) -> list[int]:
    """Positions of a tree's nodes: a node's is that of the first one plus the number of its ancestors.

    Args:
        visible: bool (T, T); [i, j]: node i sees node j, its ancestors and itself.
        start: position of the first node.
    """
    return [start + int(row.sum()) - 1 for row in visible]


def relative_error(outputs: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Error of each token's output relative to the spread of the reference.

    Args:
        outputs, references: hidden states (T, E), T tokens of hidden size E.

    Returns:
        (T,): root mean square of the difference, divided by the standard deviation of the token's reference, or by 1
        where that is 0.
    """
    spread = references.double().std(-1)
    difference = (outputs.double() - references.double()).square().mean(-1).sqrt()
    return difference / torch.where(spread > 0, spread, 1.0)
