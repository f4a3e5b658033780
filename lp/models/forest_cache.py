"""The cache of a forward pass over the tokens of several sequences: each one's own.

T: tokens of the pass, t: those of one sequence, G: KV heads, D: head dimension, N: keys of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lp.attention.parts import InParts
from lp.models.kv_cache import StaticKVCache


class Stretch(NamedTuple):
    """The tokens of one sequence, side by side in the pass.

    Attributes:
        start, end: among the tokens of the pass.
        cache: of the sequence.
    """

    start: int
    end: int
    cache: StaticKVCache


class ForestLayer(CacheLayerMixin):
    """One layer: hands out the keys and values of all sequences."""

    is_sliding = False

    def __init__(self, stretches: Sequence[Stretch], index: int, in_parts: bool) -> None:
        super().__init__()
        self.stretches = stretches
        self.index = index
        self.in_parts = in_parts

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The sequences' layers do it."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (1, G, T, D); returns (1, G, N, D): of each sequence what is cached, then what is new.

        In parts, the tensors are those given, and each part has the keys or values of its sequence.
        """
        parts = [
            cache.layers[self.index].update(key_states[:, :, start:end], value_states[:, :, start:end])
            for start, end, cache in self.stretches
        ]
        keys, values = zip(*parts, strict=True)
        if self.in_parts:
            return InParts.of(key_states, keys), InParts.of(value_states, values)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return sum(stretch.cache.length for stretch in self.stretches)

    def get_max_length(self) -> int:
        return sum(stretch.cache.capacity for stretch in self.stretches)

    def get_max_cache_shape(self) -> int:  # its name in transformers 5.0, which refuses a layer without it
        return self.get_max_length()

    def reset(self) -> None:
        """Nothing is kept here."""


class ForestCache(Cache):
    """What a pass over several sequences takes for its cache.

    Args:
        stretches: of the sequences, in the order of their tokens.
        num_layers: of the model.
        in_parts: the attention function takes `InParts`.
    """

    def __init__(self, stretches: Sequence[Stretch], num_layers: int, in_parts: bool) -> None:
        super().__init__(layers=[ForestLayer(stretches, index, in_parts) for index in range(num_layers)])
