"""The cache of a forward pass over the tokens of several sequences: each one's own.

T: tokens of the pass, t: those of one sequence, G: KV heads, D: head dimension, N: keys of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lp.attention.parts import InParts
from lp.models.kv_cache import StaticKVCache
from lp.to_device import to_device


class Stretch(NamedTuple):
    """The tokens of one sequence, side by side in the pass.

    Attributes:
        start, end: its first token among those of the pass, and the one behind its last.
        cache: the sequence's cache.
    """

    start: int
    end: int
    cache: StaticKVCache


def pool_slots(stretches: Sequence[Stretch], device: torch.device) -> torch.Tensor | None:
    """Slots of the pool that the tokens of the pass are written to, int64 (T,); None where caches share no pool."""
    first, *others = (cache for _, _, cache in stretches)
    if not first.pool or any(cache.pool is not first.pool for cache in others):
        return None
    begins = ((cache.first_slot + cache.length, end - start) for start, end, cache in stretches)
    return to_device(np.concatenate([np.arange(begin, begin + count) for begin, count in begins]), device)


class ForestLayer(CacheLayerMixin):
    """One layer: hands out the keys and values of all sequences.

    Args:
        stretches, in_parts: see `ForestCache`.
        index: index of the layer.
        slots_T: int64, the slot of the pool that each token is written to; None without a pool.
    """

    is_sliding = False

    def __init__(self, stretches: Sequence[Stretch], index: int, in_parts: bool, slots_T: torch.Tensor | None) -> None:
        super().__init__()
        self.slots_T = slots_T
        self.stretches = stretches
        self.index = index
        self.in_parts = in_parts

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the layers of the sequences' own caches allocate."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (1, G, T, D); returns (1, G, N, D): of each sequence what is cached, then what is new.

        In parts, the tensors are those given, and each part has the keys or values of its sequence.
        """
        keys, values = zip(*self._updated(key_states, value_states), strict=True)
        if self.in_parts:
            return InParts.of(key_states, keys), InParts.of(value_states, values)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def _updated(self, keys: torch.Tensor, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each sequence; one write for all of them where they lie in one pool."""
        layers: list[Any] = [cache.layers[self.index] for _, _, cache in self.stretches]
        if self.slots_T is None:
            ends = ((start, end) for start, end, _ in self.stretches)
            return [
                layer.update(keys[:, :, start:end], values[:, :, start:end])
                for layer, (start, end) in zip(layers, ends, strict=True)
            ]
        for layer in layers:
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
        layers[0].write_to_pool(self.slots_T, keys, values)
        return [
            layer.first(cache.length + end - start)
            for layer, (start, end, cache) in zip(layers, self.stretches, strict=True)
        ]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return sum(stretch.cache.length for stretch in self.stretches)

    def get_max_length(self) -> int:
        return sum(stretch.cache.capacity for stretch in self.stretches)

    def get_max_cache_shape(self) -> int:  # its name in transformers 5.0, which refuses a layer without it
        return self.get_max_length()

    def reset(self) -> None:
        """Do nothing: the layer keeps nothing of its own."""


class ForestCache(Cache):
    """What a pass over several sequences takes for its cache.

    Args:
        stretches: the sequences' stretches, in the order of their tokens.
        num_layers: how many layers the model has.
        in_parts: the attention function takes `InParts`.
        device: the model's device.
    """

    def __init__(self, stretches: Sequence[Stretch], num_layers: int, in_parts: bool, device: torch.device) -> None:
        slots_T = pool_slots(stretches, device)
        super().__init__(layers=[ForestLayer(stretches, index, in_parts, slots_T) for index in range(num_layers)])
