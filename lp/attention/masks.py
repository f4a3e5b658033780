"""The masks of a step for one model, whose layers may be of two kinds: full attention and sliding window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PretrainedConfig

from lp.attention.base import AttentionBackend, ForestView, Mask, PooledView, StepView
from lp.errors import UserError
from lp.to_device import to_device

FULL = "full_attention"
SLIDING = "sliding_attention"
KINDS = {FULL, SLIDING}
# Layers without attention, and what their masks are called: they are handed none, since nothing is padded.
UNMASKED = {"linear_attention", "conv", "moe", "mlp"}
Masks = Mask | dict[str, Mask | None] | None  # of a step; by kind of layer where a model mixes them
HYBRID = "hybrid"  # full attention beside a recurrent layer


def named_kinds(config: PretrainedConfig) -> list[str]:
    """The kind of every layer, where the config names them."""
    named = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)  # the latter: GPT-Neo
    return list(named or [])


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """The kinds of attention in a model's layers; none of those that have no attention.

    Raises:
        ValueError: a kind that a tree mask cannot express.
    """
    sliding = getattr(config, "sliding_window", None)
    kinds = set(named_kinds(config) or [SLIDING if sliding else FULL]) - UNMASKED
    if HYBRID in kinds:
        kinds = kinds - {HYBRID} | {FULL}
    if kinds - KINDS:
        raise UserError(
            f"model type {config.model_type!r} has layers of kind {sorted(kinds - KINDS)}, which take no tree mask; "
            f"supported are {sorted(KINDS)}"
        )
    return kinds


class StepMasks:
    """Builds the attention masks of a step for one model and backend; transformers hands them on as they are.

    Args:
        config: of the text model.
        dtype, device: of the model.
        backend: turns what a step's tokens see into a mask.
    """

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, backend: AttentionBackend
    ) -> None:
        self.config = config
        self.kinds = layer_kinds(config)
        self.unmasked = UNMASKED if {HYBRID, *UNMASKED} & set(named_kinds(config)) else set()
        self.dtype = dtype
        self.device = device
        self.backend = backend

    def build(
        self,
        visible: torch.Tensor | np.ndarray,
        positions: torch.Tensor,
        length: int,
        slot_mapping: torch.Tensor | None = None,
    ) -> Masks:
        """The mask, or one by kind of layer where a model mixes them; None for a single token that sees everything,
        and for a model without attention.

        Args:
            visible: (T, T) bool, within the step.
            positions: (T,) int64.
            length: L cached tokens; C, if `slot_mapping` is given.
            slot_mapping: (T,) int64, the cache slots of a captured step, as in `StepView`.
        """
        trivial = len(positions) == 1 and slot_mapping is None and self.kinds == {FULL}
        if trivial and self.backend.omits_trivial_masks:
            return None
        visible_TT = to_device(visible, self.device) if isinstance(visible, np.ndarray) else visible
        return self._by_kind(lambda window: StepView(visible_TT, positions, length, slot_mapping, window, self.dtype))

    def build_forest(self, parts: Sequence[tuple[np.ndarray, torch.Tensor, int]]) -> Masks:
        """The same for tokens of several sequences, side by side.

        Args:
            parts: of each sequence `visible`, `positions` and `length`, as of `build`.
        """
        known = [(to_device(visible, self.device), positions, length) for visible, positions, length in parts]
        return self._by_kind(lambda window: ForestView([StepView(*part, None, window, self.dtype) for part in known]))

    def build_pooled(
        self,
        visible_TT: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        first_slots_T: torch.Tensor,
        lengths_T: torch.Tensor,
        num_slots: int,
    ) -> Masks:
        """The same of a captured step, as `PooledView` has it."""
        places = (slots_T, first_slots_T, lengths_T, num_slots)
        return self._by_kind(lambda window: PooledView(visible_TT, positions_T, *places, window, self.dtype))

    def _by_kind(self, view_of: Callable[[int | None], StepView | ForestView | PooledView]) -> Masks:
        """The masks of views of layers with that sliding window."""
        if not self.kinds:
            return None
        masks: dict[str, Mask | None] = dict.fromkeys(self.unmasked)
        for kind in sorted(self.kinds):
            window = getattr(self.config, "sliding_window", None) if kind == SLIDING else None
            masks[kind] = self.backend.mask(view_of(window))
        return masks if len(masks) > 1 else masks.popitem()[1]
