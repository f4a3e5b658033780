"""The masks of a step for one model, whose layers may be of two kinds: full attention and sliding window."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from lp.attention.base import AttentionBackend, Mask, View
from lp.errors import UserError

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
        config: the text model's config.
        dtype, device: the model's dtype and device, which masks get.
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

    def build(self, view: View) -> Masks:
        """The mask of a pass, or one by kind of layer where a model mixes them.

        None for a single token that sees everything, if the backend takes that, and for a model without attention.

        Args:
            view: what layers with full attention see.
        """
        if not self.kinds:
            return None
        if view.sees_everything and self.kinds == {FULL} and self.backend.omits_trivial_masks:
            return None
        masks: dict[str, Mask | None] = dict.fromkeys(self.unmasked)
        for kind in sorted(self.kinds):
            window = getattr(self.config, "sliding_window", None) if kind == SLIDING else None
            masks[kind] = self.backend.mask(view.within(window))
        return masks if len(masks) > 1 else masks.popitem()[1]
