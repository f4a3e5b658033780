"""A KV cache that is allocated once: a step writes its KV behind the prefix, accepted tokens are committed in place.

L: cached tokens, T: step tokens, C: capacity in cache slots, G: KV heads, D: head dimension. Slot i of the prefix holds
the KV of position i; token i of a step is written to slot L + i, or to the slot that a slot mapping names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lp.models.memory import format_bytes


class CacheTooLarge(RuntimeError):
    """The device has no room for a cache.

    Args:
        extent: of the cache.
        layer_bytes: of one slot in the layer that had no room.

    Attributes:
        slot_bytes: of one slot in all layers, as if all were like that one.
        nbytes: needed for all slots.
    """

    def __init__(self, extent: _Extent, layer_bytes: int) -> None:
        self.slot_bytes = layer_bytes * extent.layers
        self.nbytes = self.slot_bytes * extent.capacity
        super().__init__(f"a KV cache of {extent.capacity} slots needs {format_bytes(self.nbytes)}")


@dataclass(slots=True)
class _Extent:
    """What a cache and its layers share. Layers that referred to the cache would outlive it until Python looks for
    cycles."""

    layers: int
    capacity: int
    zeroed: bool
    length: int = 0
    slot_mapping_T: torch.Tensor | None = None


class _PreallocatedLayer(CacheLayerMixin):
    """The KV of one layer; hands out views of its first L + T slots."""

    is_sliding = False

    def __init__(self, extent: _Extent) -> None:
        super().__init__()
        self.extent = extent

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        try:
            self.keys = self._buffer_for(key_states)
            self.values = self._buffer_for(value_states)
        except RuntimeError as error:  # of CUDA it is an OutOfMemoryError
            raise CacheTooLarge(self.extent, key_states[0, :, 0].nbytes + value_states[0, :, 0].nbytes) from error
        self.is_initialized = True

    def _buffer_for(self, states_1GTD: torch.Tensor) -> torch.Tensor:
        """An allocation for C slots of such states: (1, G, C, D)."""
        allocate = torch.Tensor.new_zeros if self.extent.zeroed else torch.Tensor.new_empty
        return allocate(states_1GTD, (*states_1GTD.shape[:2], self.extent.capacity, states_1GTD.shape[3]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.extent.slot_mapping_T is not None:
            self.keys.index_copy_(2, self.extent.slot_mapping_T, key_states)
            self.values.index_copy_(2, self.extent.slot_mapping_T, value_states)
            return self.keys, self.values
        start = self.extent.length
        end = start + key_states.shape[2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.extent.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.extent.length

    def get_max_length(self) -> int:
        return self.extent.capacity

    def get_max_cache_shape(self) -> int:  # its name in transformers 5.0, which refuses a layer without it
        return self.extent.capacity

    def reset(self) -> None:
        """The buffers stay; `StaticKVCache.clear` forgets what they hold."""


class StaticKVCache(Cache):
    """The KV of one sequence, in buffers of fixed size.

    Args:
        num_layers: decoder layers of the model.
        capacity: C, cache slots; prefix and step together must fit.
        zeroed: slots never written hold zeros, for readers of whole buffers: a mask does not hide a NaN.

    Attributes:
        capacity: C.
        length: L, committed tokens.
    """

    def __init__(self, num_layers: int, capacity: int, zeroed: bool = False) -> None:
        self.capacity = capacity
        self._extent = _Extent(num_layers, capacity, zeroed)
        super().__init__(layers=[_PreallocatedLayer(self._extent) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """L."""
        return self._extent.length

    @length.setter
    def length(self, num_tokens: int) -> None:
        self._extent.length = num_tokens

    def clear(self) -> None:
        """Forget all tokens; where whole buffers are read, a NaN that an earlier text left must not stay."""
        self.length = 0
        if self._extent.zeroed:
            for buffer in self._buffers():
                buffer.zero_()

    @contextmanager
    def writing_to(self, slot_mapping_T: torch.Tensor) -> Iterator[None]:
        """Write a captured step's KV to these cache slots, int64, and hand out the whole buffers."""
        self._extent.slot_mapping_T = slot_mapping_T
        try:
            yield
        finally:
            self._extent.slot_mapping_T = None

    def commit(self, token_indices: Sequence[int]) -> None:
        """Make these tokens of the last step part of the prefix, in this order, and forget the others.

        Args:
            token_indices: into the step's tokens.
        """
        start = self.length
        end = start + len(token_indices)
        unmoved = 0  # the first tokens lie in their slots already
        while unmoved < len(token_indices) and token_indices[unmoved] == unmoved:
            unmoved += 1
        if unmoved < len(token_indices):
            slots = self._slots(token_indices[unmoved:])
            for buffer in self._buffers():
                buffer[:, :, start + unmoved : end] = buffer[:, :, slots[buffer.device]]
        self.length = end

    def pack(self, token_indices: Sequence[int]) -> torch.Tensor:
        """Keys and values of these tokens of the last step in one flat tensor, to send to other ranks."""
        slots = self._slots(token_indices)
        device = self._buffers()[0].device
        return torch.cat([buffer[:, :, slots[buffer.device]].flatten().to(device) for buffer in self._buffers()])

    def append(self, packed: torch.Tensor, num_tokens: int) -> None:
        """Write the KV of tokens that another rank packed behind the prefix and commit them."""
        offset = 0
        for buffer in self._buffers():
            states = buffer[:, :, self.length : self.length + num_tokens]
            states.copy_(packed[offset : offset + states.numel()].view(states.shape))
            offset += states.numel()
        self.length += num_tokens

    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def _slots(self, token_indices: Sequence[int]) -> dict[torch.device, torch.Tensor]:
        """The cache slots of these tokens of the last step, once for every device that holds layers."""
        devices = {buffer.device for buffer in self._buffers()}
        return {device: torch.tensor(token_indices, device=device) + self.length for device in devices}

    def _buffers(self) -> list[torch.Tensor]:
        """Keys and values of every layer that has its own: layers may share those of another."""
        return [buffer for layer in self.layers if layer.is_initialized for buffer in (layer.keys, layer.values)]
