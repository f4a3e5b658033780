"""Scale queries by their tokens' true positions, where a model scales them: Llama 4's layers without rotary positions.

Transformers computes the scale from the number of cached tokens plus the token's index in the forward pass. In a step
that computes several branches of a draft tree, that sum is not the token's position, so these layers are given the
positions. (arXiv 2501.19399; `attn_temperature_tuning` in the config.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lp.models.releases import cache_name_in


class _CacheByPosition:
    """Stands in for the cache in such a layer, and gives a length by which each token's place becomes its position.

    Args:
        cache: keeps the keys and values.
        positions_T: int64, positions of the pass's tokens.
    """

    def __init__(self, cache: Any, positions_T: torch.Tensor) -> None:
        self._positions_T = positions_T
        self.update = cache.update

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Each token's position less its index in the pass, int64 (T,)."""
        return self._positions_T - torch.arange(len(self._positions_T), device=self._positions_T.device)


def scaled_by_position(module: nn.Module) -> Callable[..., Any] | None:
    """Give the function that replaces a Llama 4 layer's forward, so that queries are scaled by their positions.

    It is called with the layer's copy in a view of the model (a copy of the modules over the same weights), the copy's
    own forward and the arguments of the call.

    Args:
        module: any module of the model.

    Returns:
        The function; None for a module that is not a decoder layer of Llama 4, which keeps its own forward.
    """
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
