"""The masks of a step for one model, whose layers may be of several kinds: full attention, sliding window, chunks."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from lp.attention.base import AttentionBackend, Mask, View, Window
from lp.errors import UserError

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
KINDS = {FULL, SLIDING, CHUNKED}
_COMPRESSED = "keys stand for several tokens each, by their cache slots"
# Why a tree mask cannot say what a token sees, in the layers of some kinds.
OBSTACLES = {
    "indexed_attention": "an indexer with a cache of its own picks the keys, and of equal ones by their cache slots",
    "compressed_sparse_attention": _COMPRESSED,
    "heavily_compressed_attention": _COMPRESSED,
    "local": "its window is counted in cache slots",
}
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
        reasons = sorted({OBSTACLES[kind] for kind in kinds & OBSTACLES.keys()})
        why = f" ({'; '.join(reasons)})" if reasons else ""
        raise UserError(
            f"model type {config.model_type!r} has layers of kind {sorted(kinds - KINDS)}, "
            f"which take no tree mask{why}; supported are {sorted(KINDS)}: "
            "decode it with AutoregressiveDecoder"
        )
    return kinds


def window_of(kind: str, config: PretrainedConfig) -> Window | None:
    """What a token sees in layers of a kind; None: everything before it."""
    size = getattr(config, {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}.get(kind, ""), None)
    return Window(size, kind == CHUNKED) if size else None


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
            masks[kind] = self.backend.mask(view.within(window_of(kind, self.config)))
        return masks if len(masks) > 1 else masks.popitem()[1]
