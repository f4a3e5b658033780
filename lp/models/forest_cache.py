"""The cache of a forward pass over several sequences, which reads and writes the KV cache of each sequence.

T: tokens of the pass, t: tokens of one sequence in it, G: KV heads, D: head dimension, N: keys of all sequences.
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
    """The tokens of one sequence in a forward pass over several sequences, where they lie side by side.

    Attributes:
        start, end: index of the sequence's first token in the pass, and the index after its last token.
        cache: the sequence's KV cache.
    """

    start: int
    end: int
    cache: StaticKVCache


def pool_slots(stretches: Sequence[Stretch], device: torch.device) -> torch.Tensor | None:
    """Slots of the pool that the tokens of a pass are written to, int64 (T,), so that one write serves all sequences.

    Args:
        stretches: the tokens of each sequence, in the order of the pass.
        device: the model's device.

    Returns:
        The slots; None where the sequences' caches do not lie in one pool.
    """
    first, *others = (cache for _, _, cache in stretches)
    if not first.pool or any(cache.pool is not first.pool for cache in others):
        return None
    begins = ((cache.first_slot + cache.length, end - start) for start, end, cache in stretches)
    return to_device(np.concatenate([np.arange(begin, begin + count) for begin, count in begins]), device)


class ForestLayer(CacheLayerMixin):
    """One layer of `ForestCache`: stores new keys and values of all sequences, and returns all that attention reads.

    Args:
        stretches: the tokens of each sequence, in the order of the pass.
        index: index of the layer.
        in_parts: whether the attention function takes the keys and values of each sequence as a tensor of their own.
        slots_T: int64, the slot of the pool that each token is written to; None: the sequences' caches lie in no common
            pool.
    """

    is_sliding = False

    def __init__(self, stretches: Sequence[Stretch], index: int, in_parts: bool, slots_T: torch.Tensor | None) -> None:
        super().__init__()
        self.slots_T = slots_T
        self.stretches = stretches
        self.index = index
        self.in_parts = in_parts

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the layers of the sequences' own caches allocate their buffers."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a pass's tokens to the sequences' caches, and return all that attention reads.

        Args:
            key_states, value_states: (1, G, T, D), G KV heads, T tokens of the pass.

        Returns:
            Keys and values (1, G, N, D): for each sequence its cached ones, then its new ones. If the layer was made
            with `in_parts`, the given tensors are returned as `InParts`, which carry the keys or values of each
            sequence apart.
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
        """Do nothing: the layer itself keeps no keys and values."""


class ForestCache(Cache):
    """The cache that the model's forward is given in a pass over several sequences.

    It keeps nothing itself, but writes to and reads from the KV cache of each sequence.

    Args:
        stretches: the tokens of each sequence, in the order of the pass.
        num_layers: number of the model's layers.
        in_parts: whether the attention function takes the keys and values of each sequence apart (`InParts`).
        device: the model's device.
    """

    def __init__(self, stretches: Sequence[Stretch], num_layers: int, in_parts: bool, device: torch.device) -> None:
        slots_T = pool_slots(stretches, device)
        super().__init__(layers=[ForestLayer(stretches, index, in_parts, slots_T) for index in range(num_layers)])
