"""Queries that are scaled by their position: Llama 4's layers without rotary positions.

transformers scales by a token's place in the pass, behind what is cached. In a step of several branches that is not its
position. (arXiv 2501.19399; `attn_temperature_tuning` in the config.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lp.models.releases import cache_name_in


class _CacheByPosition:
    """A cache that says of its length what makes the places of a pass's tokens their positions.

    Args:
        cache: keeps the keys and values.
        positions_T: int64, of the pass's tokens.
    """

    def __init__(self, cache: Any, positions_T: torch.Tensor) -> None:
        self._positions_T = positions_T
        self.update = cache.update

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Each token's position less its index in the pass, int64 (T,)."""
        return self._positions_T - torch.arange(len(self._positions_T), device=self._positions_T.device)


def scaled_by_position(module: nn.Module) -> Callable[..., Any] | None:
    """What replaces the forward of a layer of Llama 4 in a view of the model: it is given the layer and its own one."""
    found = type(module)
    if (found.__module__, found.__name__) != ("transformers.models.llama4.modeling_llama4", "Llama4TextDecoderLayer"):
        return None

    def forward(copy: Any, own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        attention = copy.self_attn
        name = cache_name_in(kwargs)
        if attention.attn_temperature_tuning and not attention.use_rope and name is not None:
            kwargs[name] = _CacheByPosition(kwargs[name], kwargs["position_ids"][0])
        return own_forward(*args, **kwargs)

    return forward
