"""Masks for `sdpa` and `eager`: additive, 4-D, passed through transformers as they are.

T: rows of the step, L: cached rows (row i at position i). A float mask serves both backends; a bool one
would be added by `eager`, silently wrong.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lp.config import Attention

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = {FULL, SLIDING}


def resolve(model: PreTrainedModel, attention: Attention) -> Attention:
    """The backend to use; an explicit choice is set on the model, `auto` keeps what it was loaded with.

    Raises:
        ValueError: the model's own implementation takes no tree mask.
    """
    current = model.config._attn_implementation
    if attention is Attention.AUTO:
        if current in (Attention.SDPA, Attention.EAGER):
            return Attention(current)
        raise ValueError(
            f"the model's attention is {current!r}, which takes no tree mask; "
            "load it with attn_implementation='sdpa' or 'eager', or choose attention=sdpa"
        )
    if attention != current:
        model.set_attn_implementation(str(attention))
    return attention


def layer_kinds(config: PretrainedConfig) -> tuple[set[str], int | None]:
    """The kinds of attention in a model's layers, and its sliding window in tokens.

    Raises:
        ValueError: a kind that a tree mask cannot express.
    """
    sliding = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [SLIDING if sliding else FULL])
    if kinds - KINDS:
        raise ValueError(f"layers of kind {sorted(kinds - KINDS)} take no tree mask; supported are {sorted(KINDS)}")
    return kinds, sliding


class StepMasks:
    """Builds the attention mask of a step for one model."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.kinds, self.sliding_window = layer_kinds(config)
        self.dtype, self.device = dtype, device

    def build(
        self, visible: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask, or one by kind of layer where a model mixes them.

        Args:
            visible: (T, T) bool, within the step.
            positions: (T,) int64.
            length: L, all of whose rows every row of the step sees, but for a sliding window.
        """
        seen = torch.ones(len(positions), length + len(positions), dtype=torch.bool, device=self.device)
        seen[:, length:] = visible
        masks = {kind: self._additive(seen, positions, length, kind) for kind in sorted(self.kinds)}
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _additive(self, seen: torch.Tensor, positions: torch.Tensor, length: int, kind: str) -> torch.Tensor:
        if kind == SLIDING and self.sliding_window is not None:
            keys = torch.cat([torch.arange(length, device=self.device), positions])
            seen = seen & (positions[:, None] - keys[None] < self.sliding_window)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[None, None]  # (1, 1, T, L + T)
