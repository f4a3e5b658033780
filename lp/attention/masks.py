"""Masks of a tree-shaped step, passed through transformers as they are.

T: rows of the step, L: cached rows (row i at position i), C: capacity of the cache. `sdpa` and `eager` take an additive
4-D mask, (1, 1, T, L + T): a bool one would be added by `eager`, silently wrong. `flash` takes that of the step's own
rows, (1, 1, T, T), and as `sdpa` does where a sliding window hides cached rows; `flex` takes a BlockMask.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PretrainedConfig

from lp.config import Attention
from lp.errors import UserError

Mask = torch.Tensor | BlockMask
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = {FULL, SLIDING}


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """The kinds of attention in a model's layers.

    Raises:
        ValueError: a kind that a tree mask cannot express.
    """
    sliding = getattr(config, "sliding_window", None)
    named = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)  # the latter: GPT-Neo
    kinds = set(named or [SLIDING if sliding else FULL])
    if kinds - KINDS:
        raise UserError(
            f"model type {config.model_type!r} has layers of kind {sorted(kinds - KINDS)}, which take no tree mask; "
            f"supported are {sorted(KINDS)}"
        )
    return kinds


class StepMasks:
    """Builds the attention mask of a step for one model and backend."""

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, attention: Attention = Attention.SDPA
    ) -> None:
        self.config, self.kinds, self.attention = config, layer_kinds(config), attention
        self.dtype, self.device = dtype, device

    def build(
        self,
        visible: torch.Tensor | np.ndarray,
        positions: torch.Tensor,
        length: int,
        places: torch.Tensor | None = None,
    ) -> Mask | dict[str, Mask] | None:
        """The mask, or one by kind of layer where a model mixes them; none for a single row, which sees everything.

        Args:
            visible: (T, T) bool, within the step.
            positions: (T,) int64.
            length: L, all of whose rows every row of the step sees, but for a sliding window; C, if `places` is given.
            places: (T,) int64, where the step's rows lie in a buffer of C rows: what is before them is seen, nothing
                that is behind.
        """
        unmasked = self.attention in (Attention.SDPA, Attention.FLASH) and self.kinds == {FULL}
        if unmasked and places is None and len(positions) == 1:
            return None
        shown = torch.as_tensor(visible, device=self.device)
        masks = {kind: self._mask(shown, positions, length, places, kind) for kind in sorted(self.kinds)}
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _mask(
        self, visible: torch.Tensor, positions: torch.Tensor, length: int, places: torch.Tensor | None, kind: str
    ) -> Mask:
        window = getattr(self.config, "sliding_window", None) if kind == SLIDING else None  # tokens, the row's included
        if self.attention is Attention.FLASH and window is None:
            return self._additive(visible)
        if places is None:
            keys = torch.cat([torch.arange(length, device=self.device), positions])
            seen = torch.cat([visible.new_ones(len(visible), length), visible], 1)
        else:
            row = torch.arange(length, device=self.device) - places[0]  # of the step, by place
            own = row.clamp(0, len(visible) - 1)
            seen = (row < 0) | (row < len(visible)) & visible[:, own]
            keys = torch.where(row < 0, row + places[0], positions[own])
        if window is not None:
            seen = seen & (positions[:, None] - keys[None] < window)
        return block_mask(seen) if self.attention is Attention.FLEX else self._additive(seen)

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[None, None]  # (1, 1, T, L + T)


def block_mask(seen: torch.Tensor) -> BlockMask:
    """For FlexAttention, which skips the blocks of keys that no row sees: from (T, N) bool."""
    return create_block_mask(
        lambda b, h, row, key: seen[row, key], None, None, seen.shape[0], seen.shape[1], seen.device
    )
