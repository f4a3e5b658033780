"""A KV cache that is allocated once: a step writes its KV behind the prefix, accepted tokens are committed in place.

L: cached tokens, T: step tokens, C: capacity in cache slots, G: KV heads, D: head dimension. Slot i of the prefix holds
the KV of position i; token i of a step is written to slot L + i, or to the slot that a slot mapping names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lp.config import KVDtype
from lp.models.memory import format_bytes
from lp.models.quantised_kv import SCALE_BYTES, dequantised, quantised
from lp.to_device import to_device


class CacheTooLarge(RuntimeError):
    """The device has no room for a cache.

    Args:
        slot_bytes: bytes of one slot in all layers.
        capacity: how many slots were asked for.

    Attributes:
        slot_bytes: bytes of one slot in all layers.
        nbytes: bytes of all slots.
    """

    def __init__(self, slot_bytes: int, capacity: int) -> None:
        self.slot_bytes = slot_bytes
        self.nbytes = slot_bytes * capacity
        super().__init__(f"a KV cache of {capacity} slots needs {format_bytes(self.nbytes)}")


@dataclass(frozen=True)
class StatesKind:
    """What the keys, or the values, of a layer are like: those of one kind lie in one tensor.

    Attributes:
        heads: G.
        dim: D.
        dtype, device: dtype and device of the states.
        kv_dtype: what slots hold them as.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: KVDtype = KVDtype.AUTO

    @classmethod
    def of(cls, states_1GTD: torch.Tensor, kv_dtype: KVDtype = KVDtype.AUTO) -> StatesKind:
        """The kind of these states."""
        return cls(states_1GTD.shape[1], states_1GTD.shape[3], states_1GTD.dtype, states_1GTD.device, kv_dtype)

    @property
    def as_given(self) -> bool:
        """Whether slots hold the states as they are, and not quantised."""
        return self.kv_dtype is KVDtype.AUTO

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in one layer."""
        return self.heads * (self.dim * self.dtype.itemsize if self.as_given else self.dim + SCALE_BYTES)

    def allocated(self, count: int, slots: int, zeroed: bool) -> torch.Tensor:
        """Room for so many keys or values: (count, G, slots, D), or the rows of `lp.models.quantised_kv`.

        Raises:
            RuntimeError: the device has none.
        """
        size, dtype = (self.dim, self.dtype) if self.as_given else (self.dim + SCALE_BYTES, torch.int8)
        allocate = torch.zeros if zeroed else torch.empty
        return allocate((count, self.heads, slots, size), dtype=dtype, device=self.device)

    def stored(self, states_1GTD: torch.Tensor) -> torch.Tensor:
        """What slots hold of these states."""
        return states_1GTD if self.as_given else quantised(states_1GTD, self.kv_dtype)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The states that slots hold: themselves, or else a tensor that nobody keeps."""
        return slots if self.as_given else dequantised(slots, self.kv_dtype, self.dtype)


@dataclass(slots=True)
class _Extent:
    """What a cache and its layers share. Layers that referred to the cache would outlive it until Python looks for
    cycles.

    Attributes:
        layers: how many layers the model has.
        capacity: C.
        zeroed: slots hold zeros until something is written.
        known: how many keys and values of each kind the model has; the first cache of a model finds out.
        kv_dtype: what slots hold keys and values as.
        length: L.
        slot_mapping_T: where the KV of a captured step is written.
        buffers: by kind, (n, G, C, D) each.
        pool: by kind, what the buffers are a part of, from slot `first_slot` on; empty where they are their own.
        claimed: by kind, how many keys and values layers have taken.
    """

    layers: int
    capacity: int
    zeroed: bool
    known: dict[StatesKind, int]
    kv_dtype: KVDtype = KVDtype.AUTO
    length: int = 0
    slot_mapping_T: torch.Tensor | None = None
    buffers: dict[StatesKind, list[torch.Tensor]] = field(default_factory=dict)
    pool: Mapping[StatesKind, torch.Tensor] = field(default_factory=dict)
    first_slot: int = 0
    claimed: dict[StatesKind, int] = field(default_factory=dict)

    def claim(self, kind: StatesKind) -> int:
        """The keys, or the values, of one more layer: their index among all of the kind."""
        buffers = self.buffers.setdefault(kind, [])
        index = self.claimed.get(kind, 0)
        before = sum(map(len, buffers[:-1]))
        if not buffers or index - before == len(buffers[-1]):
            before = sum(map(len, buffers))
            most = 2 * self.layers - sum(self.claimed.values())  # if all that are left were of this kind
            count = max(self.known.get(kind, most) - index, 1)
            buffers.append(kind.allocated(count, self.capacity, self.zeroed))
        self.claimed[kind] = index + 1
        self.known[kind] = max(self.known.get(kind, 0), index + 1)
        return index

    def states(self, kind: StatesKind, index: int) -> torch.Tensor:
        """The buffer of claimed keys or values, (1, G, C, D): a part of the tensor that all of the kind lie in."""
        for buffer in self.buffers[kind]:
            if index < len(buffer):
                return buffer[index : index + 1]
            index -= len(buffer)
        raise AssertionError("nobody claimed it")


class PreallocatedLayer(CacheLayerMixin):
    """The KV of one layer; hands out views of its first L + T slots."""

    is_sliding = False

    def __init__(self, extent: _Extent) -> None:
        super().__init__()
        self.extent = extent

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        kinds = [StatesKind.of(states, self.extent.kv_dtype) for states in (key_states, value_states)]
        try:
            self._claimed = [(kind, self.extent.claim(kind)) for kind in kinds]
        except RuntimeError as error:  # of CUDA it is an OutOfMemoryError
            layer_bytes = sum(kind.slot_bytes for kind in kinds)
            raise CacheTooLarge(layer_bytes * self.extent.layers, self.extent.capacity) from error
        self.is_initialized = True
        self.rebind()

    def rebind(self) -> None:
        """Take up buffers that lie elsewhere."""
        if self.is_initialized:
            self.keys, self.values = (self.extent.states(kind, index) for kind, index in self._claimed)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        keys, values = self._stored(key_states, value_states)
        if self.extent.slot_mapping_T is not None:
            self.keys.index_copy_(2, self.extent.slot_mapping_T, keys)
            self.values.index_copy_(2, self.extent.slot_mapping_T, values)
            return self.first(self.keys.shape[2])
        start = self.extent.length
        end = start + key_states.shape[2]
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        return self.first(end)

    def write_to_pool(self, slots_T: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write the KV of several caches' tokens, which lie in one pool with this one, to these slots of the pool."""
        stored = self._stored(key_states, value_states)
        for (kind, index), states in zip(self._claimed, stored, strict=True):
            self.extent.pool[kind][index].index_copy_(1, slots_T, states[0])

    def first(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first slots, as attention is to see them."""
        assert self.keys is not None and self.values is not None
        (of_keys, _), (of_values, _) = self._claimed
        return of_keys.read(self.keys[:, :, :num_slots]), of_values.read(self.values[:, :, :num_slots])

    def _stored(self, *keys_and_values: torch.Tensor) -> list[torch.Tensor]:
        """What slots hold of these keys and values."""
        return [kind.stored(states) for (kind, _), states in zip(self._claimed, keys_and_values, strict=True)]

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
        deferred: what a commit moves is moved by the next captured step, which takes it with `take_moves`; `flush`
            moves it at once, before anything else reads or writes the cache.
        known: how many keys and values of each kind the model has, which its first cache finds out.
        kv_dtype: what slots hold keys and values as.

    Attributes:
        capacity: C.
        length: L, committed tokens.
    """

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        zeroed: bool = False,
        deferred: bool = False,
        known: dict[StatesKind, int] | None = None,
        kv_dtype: KVDtype = KVDtype.AUTO,
    ) -> None:
        self.capacity = capacity
        self.deferred = deferred
        self._moves: tuple[list[int], list[int]] = ([], [])  # slots to move from, and to
        self._extent = _Extent(num_layers, capacity, zeroed, {} if known is None else known, kv_dtype)
        super().__init__(layers=[PreallocatedLayer(self._extent) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """L, how many tokens are committed."""
        return self._extent.length

    @length.setter
    def length(self, num_tokens: int) -> None:
        self._extent.length = num_tokens

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Keys and values of all layers that have their own, since layers may share those of another: (n, G, C, D)."""
        return [buffer for buffers in self._extent.buffers.values() for buffer in buffers]

    @property
    def claimed(self) -> bool:
        """Whether layers have taken their buffers, as they do in the first pass."""
        return bool(self._extent.claimed)

    def allocate(self) -> None:
        """The buffers of all layers whose kinds are known, before a step needs them.

        Raises:
            CacheTooLarge: the device has no room for them.
        """
        extent = self._extent
        for kind, count in extent.known.items():
            try:
                extent.buffers[kind] = [kind.allocated(count, extent.capacity, extent.zeroed)]
            except RuntimeError as error:  # of CUDA it is an OutOfMemoryError
                raise CacheTooLarge(slot_bytes(extent.known), extent.capacity) from error

    def lie_in(self, pool: Mapping[StatesKind, torch.Tensor], first_slot: int, num_slots: int) -> None:
        """Take some slots of a pool as the buffers.

        Args:
            pool: one tensor of each known kind, (n, G, slots, D).
            first_slot, num_slots: slots of the pool that this cache takes; what is cached lies there already.
        """
        extent = self._extent
        extent.buffers = {kind: [buffer[:, :, first_slot : first_slot + num_slots]] for kind, buffer in pool.items()}
        extent.pool, extent.first_slot = pool, first_slot
        for layer in self.layers:
            layer.rebind()

    @property
    def pool(self) -> Mapping[StatesKind, torch.Tensor]:
        """What it lies in, as `lie_in` was given it; empty where the buffers are its own."""
        return self._extent.pool

    @property
    def first_slot(self) -> int:
        """Number of the slot of the pool where the cache begins."""
        return self._extent.first_slot

    def first(self, num_tokens: int) -> list[torch.Tensor]:
        """What the slots of the first tokens hold, by buffer: (n, G, num_tokens, D), or rows of quantised states."""
        self.flush()
        return [buffer[:, :, :num_tokens] for buffer in self.buffers]

    def begin_with(self, states: Sequence[torch.Tensor], num_tokens: int) -> None:
        """Begin with the first tokens of another cache of this model, as its `first` gives them; this one is empty."""
        assert not self.length
        for own, theirs in zip(self.buffers, states, strict=True):
            own[:, :, :num_tokens] = theirs
        self.length = num_tokens

    def clear(self) -> None:
        """Forget all tokens; where whole buffers are read, a NaN that an earlier text left must not stay."""
        self.length = 0
        self._moves = ([], [])
        if self._extent.zeroed:
            for buffer in self.buffers:
                buffer.zero_()

    def begin(self, visible_TT: torch.Tensor | np.ndarray | None) -> None:
        """Before a pass: which tokens each of its tokens sees; None where it is a chain that is committed whole.

        Attention is told by its mask. A cache that also holds recurrent states needs to know.
        """

    def begin_replay(self, num_tokens: int) -> None:
        """Before a captured step of so many tokens, padding included: `begin` was called when it was captured."""

    @property
    def slot_mapping(self) -> torch.Tensor | None:
        """Within `writing_to`, the slots that it was given."""
        return self._extent.slot_mapping_T

    def whole(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of all slots in a layer, (1, G, C, D) each, to be written to; None as long as it has no
        buffers, or where they hold something else.
        """
        states: PreallocatedLayer = self.layers[layer]
        as_given = self._extent.kv_dtype is KVDtype.AUTO
        return states.first(self.capacity) if as_given and states.is_initialized else None

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
        unmoved = 0  # the first tokens lie in their slots already
        while unmoved < len(token_indices) and token_indices[unmoved] == unmoved:
            unmoved += 1
        self.length = start + len(token_indices)
        if unmoved == len(token_indices):
            return
        self.flush()
        self._moves = ([start + index for index in token_indices[unmoved:]], [*range(start + unmoved, self.length)])
        if not self.deferred:
            self.flush()

    @property
    def num_moves(self) -> int:
        """Slots that the last commit has left to the next step."""
        return len(self._moves[0])

    def take_moves(self) -> tuple[list[int], list[int]]:
        """Slots that the last commit moves from and to, for a step that does it itself."""
        moves = self._moves
        self._moves = ([], [])
        return moves

    def flush(self) -> None:
        """Move what the last commit left to the next step."""
        sources, targets = self.take_moves()
        if sources:
            for buffer, slots in self._slots(sources):
                buffer[:, :, targets[0] : targets[-1] + 1] = buffer[:, :, slots]

    def move(
        self, source_M: torch.Tensor, target_M: torch.Tensor, by_kernel: Callable[..., None] | None = None
    ) -> None:
        """Move slots in a captured step, which reads from memory which ones: int64.

        Args:
            source_M, target_M: ascending within a text, no slot before its target; what moves nowhere comes last.
            by_kernel: `lp.models.layer_kernels.move_slots`; None: by torch.
        """
        for buffer in self.buffers:
            if by_kernel is None:
                buffer.index_copy_(2, target_M, buffer.index_select(2, source_M))
            else:
                by_kernel(buffer, source_M, target_M)

    def pack(self, token_indices: Sequence[int]) -> torch.Tensor:
        """Keys and values of these tokens of the last step in one flat tensor, to send to other ranks."""
        device = self.buffers[0].device
        slots_of = self._slots([self.length + index for index in token_indices])
        return torch.cat([buffer[:, :, slots].flatten().to(device) for buffer, slots in slots_of])

    def append(self, packed: torch.Tensor, num_tokens: int) -> None:
        """Write the KV of tokens that another rank packed behind the prefix and commit them."""
        self.flush()
        offset = 0
        for buffer in self.buffers:
            states = buffer[:, :, self.length : self.length + num_tokens]
            states.copy_(packed[offset : offset + states.numel()].view(states.shape))
            offset += states.numel()
        self.length += num_tokens

    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def _slots(self, slots: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every buffer with these slots as a tensor on its device."""
        for buffer in self.buffers:
            yield buffer, to_device(slots, buffer.device)


def slot_bytes(kinds: Mapping[StatesKind, int]) -> int:
    """Bytes of one slot, in all layers."""
    return sum(count * kind.slot_bytes for kind, count in kinds.items())
