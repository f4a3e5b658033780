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
        ValueError: the model's own implementation takes no tree mask, or it has none of that name.
    """
    if attention is Attention.AUTO:
        current = model.config._attn_implementation
        if current not in (Attention.SDPA, Attention.EAGER):
            raise ValueError(
                f"the model's attention is {current!r}, which takes no tree mask; "
                "load it with attn_implementation='sdpa' or 'eager', or choose attention=sdpa"
            )
        attention = Attention(current)
    name = type(model).__name__
    if attention is Attention.SDPA and getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        raise ValueError(f"{name} caps its attention scores, which sdpa leaves out; choose attention=eager")
    if attention != model.config._attn_implementation:
        _set(model, attention)
    return attention


def _set(model: PreTrainedModel, attention: Attention) -> None:
    name, before = type(model).__name__, model.config._attn_implementation
    if attention is Attention.SDPA and not getattr(model, "_supports_sdpa", True):
        raise ValueError(f"{name} has no sdpa attention in transformers; choose attention={before}")
    model.set_attn_implementation(str(attention))
    if model.config._attn_implementation != attention:  # transformers only warns
        raise ValueError(
            f"{name} cannot change its attention once loaded with {before!r}; "
            f"load it with attn_implementation={str(attention)!r}, or choose attention={before}"
        )


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """The kinds of attention in a model's layers.

    Raises:
        ValueError: a kind that a tree mask cannot express.
    """
    sliding = getattr(config, "sliding_window", None)
    named = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)  # the latter: GPT-Neo
    kinds = set(named or [SLIDING if sliding else FULL])
    if kinds - KINDS:
        raise ValueError(
            f"model type {config.model_type!r} has layers of kind {sorted(kinds - KINDS)}, which take no tree mask; "
            f"supported are {sorted(KINDS)}"
        )
    return kinds


class StepMasks:
    """Builds the attention mask of a step for one model."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.kinds = config, layer_kinds(config)
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
        window = getattr(self.config, "sliding_window", None)  # in tokens, the row itself included
        if kind == SLIDING and window is not None:
            keys = torch.cat([torch.arange(length, device=self.device), positions])
            seen = seen & (positions[:, None] - keys[None] < window)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[None, None]  # (1, 1, T, L + T)
