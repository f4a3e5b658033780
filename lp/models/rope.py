"""Rotary scalings that depend on the largest position of a forward pass: longrope and dynamic NTK.

When a pass has positions past a length that the config names (the boundary), every token of the pass is rotated by
other frequencies. So tokens past the boundary change the keys of tokens before it. A decode step therefore never
straddles the boundary, and a prompt past it is prefilled with the frequencies of one pass over the whole prompt. Other
scalings (linear, llama3, yarn) depend on each token's own position alone.
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
    """The sequence length at which a model's rotary frequencies change.

    Attributes:
        length: a number of tokens; a forward pass whose positions (from 0) are all below it has the original
            frequencies.
        grows: whether every length past it has frequencies of its own (dynamic NTK), not one set for all (longrope).
        refills: whether plain decoding computes the whole cache anew at the first step past it.
        stretched: the most tokens that the scaling is meant for, where the config gives a factor; None: the config
            names this number itself.
    """

    length: int
    grows: bool = False
    refills: bool = False
    stretched: int | None = None

    def limit(self, position: int, limit: int) -> int:
        """Limit the positions of one decode step, so that its tokens have the frequencies that plain decoding uses.

        Args:
            position: position of the sequence's last token, with which the step begins.
            limit: the limit that the sequence has otherwise; exclusive.

        Returns:
            The step may use positions below this number.
        """
        if position < self.length:
            return min(limit, self.length)
        return min(limit, position + 1) if self.grows else limit


def rope_boundary(config: Any) -> RopeBoundary | None:
    """Find the length at which a model's rotary frequencies change; None: they do not depend on the length.

    Args:
        config: config of the text model.

    Raises:
        ValueError: different kinds of layers change their frequencies at different lengths.
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
