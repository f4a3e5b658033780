"""Builds a step's attention masks for a model whose layers have full attention, a sliding window or chunks."""

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
# Kinds of layers for which no tree mask can say what a token sees, and why.
OBSTACLES = {
    "indexed_attention": "an indexer with a cache of its own picks the keys, and of equal ones by their cache slots",
    "compressed_sparse_attention": _COMPRESSED,
    "heavily_compressed_attention": _COMPRESSED,
    "local": "its window is counted in cache slots",
}
# Layers without attention, and what their masks are called: they are handed none, since nothing is padded.
UNMASKED = {"linear_attention", "conv", "moe", "mlp"}
Masks = Mask | dict[str, Mask | None] | None  # masks of a step, by kind of layer if a model mixes them
HYBRID = "hybrid"  # full attention beside a recurrent layer


def named_kinds(config: PretrainedConfig) -> list[str]:
    """The type of every layer as the config names it, such as "sliding_attention"; [] if the config names none."""
    named = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)  # the latter: GPT-Neo
    return list(named or [])


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """The types of attention that a model's layers have: FULL, SLIDING or CHUNKED; empty if no layer has attention.

    Args:
        config: the text model's config.

    Raises:
        ValueError: some layers have a type of attention that a mask for a draft tree can't express.
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
    """The attention window of layers of one type, from the config; None: a token sees everything before it.

    Args:
        kind: the type of attention: FULL, SLIDING or CHUNKED.
        config: the text model's config.
    """
    size = getattr(config, {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}.get(kind, ""), None)
    return Window(size, kind == CHUNKED) if size else None


class StepMasks:
    """Builds the attention masks of each step for one model and backend, in the form that the model takes.

    Args:
        config: the text model's config.
        dtype, device: dtype and device of the model and its masks.
        backend: the attention backend, which makes a mask from a view (which keys each token sees).
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
        """Build the argument `attention_mask` of a forward pass.

        Args:
            view: which keys each token sees in layers with full attention.

        Returns:
            One mask; or, if layers have several types of attention, a mask for each type, by its name. None for a model
            without attention, and for a single token that sees everything if the backend then needs no mask.
        """
        if not self.kinds:
            return None
        if view.sees_everything and self.kinds == {FULL} and self.backend.omits_trivial_masks:
            return None
        masks: dict[str, Mask | None] = dict.fromkeys(self.unmasked)
        for kind in sorted(self.kinds):
            masks[kind] = self.backend.mask(view.within(window_of(kind, self.config)))
        return masks if len(masks) > 1 else masks.popitem()[1]
