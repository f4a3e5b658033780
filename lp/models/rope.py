"""Rotary scalings that depend on the largest position of a forward pass: longrope and dynamic NTK.

Past a length that the config names (the boundary) they rotate every token of the pass by other frequencies, so that
tokens beyond it change those before it. A step therefore never straddles that length, and a prompt past it is prefilled
as if in one pass. Other scalings (linear, llama3, yarn) depend on each token's own position alone.
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
    """The text length at which a model's rotary frequencies change.

    Attributes:
        length: a number of tokens; a forward pass whose positions are all below it has the original frequencies.
        grows: whether every length beyond it has frequencies of its own (dynamic NTK), not one set for all (longrope).
        refills: whether plain decoding computes the whole cache anew at the first step beyond it.
        stretched: the most tokens that the scaling is meant for, where it follows from a factor; None: the config says
            it.
    """

    length: int
    grows: bool = False
    refills: bool = False
    stretched: int | None = None

    def limit(self, position: int, limit: int) -> int:
        """The limit of positions for one decode step, so that its tokens have the frequencies that plain decoding uses.

        Args:
            position: position of the text's last token, with which the step begins.
            limit: the limit of positions that the text has otherwise.

        Returns:
            The step may use positions below it.
        """
        if position < self.length:
            return min(limit, self.length)
        return min(limit, position + 1) if self.grows else limit


def rope_boundary(config: Any) -> RopeBoundary | None:
    """Where the rotary frequencies of a model change with the length of the text; None: they are fixed.

    Args:
        config: config of the text model.

    Raises:
        ValueError: kinds of layers whose frequencies change at different lengths.
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
