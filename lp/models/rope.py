"""Rotary scalings that look at the largest position of a forward pass: longrope and dynamic NTK.

Past a length named in the config they rotate every token of the pass by other frequencies, so that tokens beyond it
change those before it. A step therefore never straddles that length, and a prompt past it is prefilled as if in one
pass. Other scalings (linear, llama3, yarn) are functions of each token's own position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lp.errors import UserError

# For these, `generate` computes the whole cache anew when the text grows past the boundary; others leave it.
REFILLING = {"phi3", "phimoe", "phi4_multimodal"}


@dataclass(frozen=True)
class RopeBoundary:
    """Where a model's rotary frequencies change.

    Attributes:
        length: a forward pass whose positions are all below it has the original frequencies.
        grows: beyond it every length has frequencies of its own (dynamic), not one set for all (longrope).
        refills: plain decoding computes the cache anew at the first step beyond it.
        stretched: tokens up to which the scaling is meant to be used, where the config does not say it otherwise.
    """

    length: int
    grows: bool = False
    refills: bool = False
    stretched: int | None = None

    def limit(self, position: int, limit: int) -> int:
        """Positions below it may be used by a step whose `c` is at `position`, and whose text allows `limit`."""
        if position < self.length:
            return min(limit, self.length)
        return min(limit, position + 1) if self.grows else limit


def rope_boundary(config: Any) -> RopeBoundary | None:
    """The boundary of a text model's config, or None where frequencies are fixed.

    Raises:
        ValueError: kinds of layers with different boundaries.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    layers = [p for p in parameters.values() if isinstance(p, Mapping)] or [parameters]  # by kind of layer, or for all
    found = {boundary for layer in layers if (boundary := _boundary(config, layer))}
    if len(found) > 1:
        lengths = sorted(boundary.length for boundary in found)
        raise UserError(
            f"model type {config.model_type!r} changes its rotary frequencies at {lengths} tokens; "
            "one such length is supported: decode it with AutoregressiveDecoder"
        )
    return found.pop() if found else None


def _boundary(config: Any, parameters: Mapping[str, Any]) -> RopeBoundary | None:
    kind = parameters.get("rope_type", "default")
    context = getattr(config, "max_position_embeddings", None)
    if kind == "longrope":
        length = parameters.get("original_max_position_embeddings") or context
        return None if length is None else RopeBoundary(length, refills=config.model_type in REFILLING)
    if "dynamic" in kind and context is not None:
        return RopeBoundary(context, grows=True, stretched=int(context * parameters.get("factor", 1.0)))
    return None
