"""A KV cache that is allocated once: a step writes its rows behind the prefix, accepted rows are committed in place.

L: cached rows, T: rows of a step, C: capacity, H: KV heads, D: head dimension. Row i of the prefix is position i.
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
        layer_bytes: of one row in the layer that had no room.

    Attributes:
        row_bytes: of one row in all layers, as if all were like that one.
        nbytes: needed for all rows.
    """

    def __init__(self, extent: _Extent, layer_bytes: int) -> None:
        self.row_bytes = layer_bytes * extent.layers
        self.nbytes = self.row_bytes * extent.capacity
        super().__init__(f"a KV cache of {extent.capacity} slots needs {format_bytes(self.nbytes)}")


@dataclass(slots=True)
class _Extent:
    """What a cache and its layers both know. Layers that knew the cache would keep it until Python looks for cycles."""

    layers: int
    capacity: int
    zeroed: bool
    length: int = 0
    places: torch.Tensor | None = None


class _PreallocatedLayer(CacheLayerMixin):
    """One layer's rows; hands out views of the first L + T of them."""

    is_sliding = False

    def __init__(self, extent: _Extent) -> None:
        super().__init__()
        self.extent = extent

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        make = torch.Tensor.new_zeros if self.extent.zeroed else torch.Tensor.new_empty
        try:
            self.keys, self.values = (
                make(states, (*states.shape[:2], self.extent.capacity, states.shape[3]))  # (1, H, C, D)
                for states in (key_states, value_states)
            )
        except RuntimeError as error:  # of CUDA it is an OutOfMemoryError
            raise CacheTooLarge(self.extent, key_states[0, :, 0].nbytes + value_states[0, :, 0].nbytes) from error
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.extent.places is not None:
            self.keys.index_copy_(2, self.extent.places, key_states)
            self.values.index_copy_(2, self.extent.places, value_states)
            return self.keys, self.values
        start, rows = self.extent.length, key_states.shape[2]
        self.keys[:, :, start : start + rows] = key_states
        self.values[:, :, start : start + rows] = value_states
        return self.keys[:, :, : start + rows], self.values[:, :, : start + rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.extent.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.extent.length

    def get_max_length(self) -> int:
        return self.extent.capacity

    def get_max_cache_shape(self) -> int:  # its name in transformers 5.0, which refuses a layer without it
        return self.extent.capacity

    def reset(self) -> None:
        """The rows stay; `StaticKVCache.clear` forgets their number."""


class StaticKVCache(Cache):
    """The KV of one sequence, in buffers of fixed size.

    Args:
        num_layers: decoder layers of the model.
        capacity: C, rows; prefix and step together must fit.
        zeroed: rows never written are zeros, for readers of whole buffers: a mask does not hide a NaN.

    Attributes:
        capacity: C.
        length: L, committed rows.
    """

    def __init__(self, num_layers: int, capacity: int, zeroed: bool = False) -> None:
        self.capacity, self._extent = capacity, _Extent(num_layers, capacity, zeroed)
        super().__init__(layers=[_PreallocatedLayer(self._extent) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """L."""
        return self._extent.length

    @length.setter
    def length(self, rows: int) -> None:
        self._extent.length = rows

    def clear(self) -> None:
        """Forget all rows; where whole buffers are read, a NaN that an earlier text left must not stay."""
        self.length = 0
        if self._extent.zeroed:
            for buffer in self._buffers():
                buffer.zero_()

    @contextmanager
    def writing_to(self, places: torch.Tensor) -> Iterator[None]:
        """Write a captured step's rows at these places of the buffers, (T,) int64, and hand out the whole of them."""
        self._extent.places = places
        try:
            yield
        finally:
            self._extent.places = None

    def commit(self, rows: Sequence[int]) -> None:
        """Make these rows of the last step part of the prefix, in this order, and forget the others.

        Args:
            rows: indices into the step's rows, ascending.
        """
        start, kept = self.length, len(rows)
        moved = next((i for i, row in enumerate(rows) if row != i), kept)  # rows before it lie where they belong
        if moved < kept:
            places = self._places(rows[moved:])
            for buffer in self._buffers():
                buffer[:, :, start + moved : start + kept] = buffer[:, :, places[buffer.device]]
        self.length = start + kept

    def rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Keys and values of these rows of the last step, flat, to send to other ranks."""
        places, device = self._places(rows), self._buffers()[0].device
        return torch.cat([buffer[:, :, places[buffer.device]].flatten().to(device) for buffer in self._buffers()])

    def append(self, flat: torch.Tensor, count: int) -> None:
        """Write `count` rows that another rank sent behind the prefix and commit them."""
        offset = 0
        for buffer in self._buffers():
            rows = buffer[:, :, self.length : self.length + count]
            rows.copy_(flat[offset : offset + rows.numel()].view(rows.shape))
            offset += rows.numel()
        self.length += count

    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def _places(self, rows: Sequence[int]) -> dict[torch.device, torch.Tensor]:
        """Where these rows of the last step lie, once for every device that holds layers."""
        devices = {buffer.device for buffer in self._buffers()}
        return {device: torch.tensor(rows, device=device) + self.length for device in devices}

    def _buffers(self) -> list[torch.Tensor]:
        """Of every layer that has some: layers may share those of another."""
        return [buffer for layer in self.layers if layer.is_initialized for buffer in (layer.keys, layer.values)]
