"""A KV cache that is allocated once: a step writes its KV after the prefix, and accepted tokens are kept in place.

L: cached tokens (the prefix), T: step tokens, C: capacity in cache slots, G: KV heads, D: head dimension, n: key and
value tensors of one kind (`StatesKind`) in all layers. Slot i of the prefix holds the KV of position i. Token i of a
step is written to slot L + i, or to the slot that a slot mapping names.
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
    """The device has no room for a KV cache.

    Args:
        slot_bytes: bytes of one slot, in all layers together.
        capacity: number of slots that were asked for.

    Attributes:
        slot_bytes: bytes of one slot, in all layers together.
        nbytes: bytes of all slots that were asked for.
    """

    def __init__(self, slot_bytes: int, capacity: int) -> None:
        self.slot_bytes = slot_bytes
        self.nbytes = slot_bytes * capacity
        super().__init__(f"a KV cache of {capacity} slots needs {format_bytes(self.nbytes)}")


@dataclass(frozen=True)
class StatesKind:
    """Size, dtype and device of a layer's keys, or of its values; a cache keeps all of one kind in one tensor.

    Attributes:
        heads: G, number of KV heads.
        dim: D, head dimension.
        dtype, device: dtype and device of keys and values as the model computes them.
        kv_dtype: dtype in which cache slots store them: AUTO for the model's own, else INT8 or FP8.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: KVDtype = KVDtype.AUTO

    @classmethod
    def of(cls, states_1GTD: torch.Tensor, kv_dtype: KVDtype = KVDtype.AUTO) -> StatesKind:
        """Describe these keys or values by size, dtype and device, so that a cache can allocate room for them.

        Args:
            states_1GTD: keys or values as the model computes them, (1, G, T, D): G KV heads, T tokens, head dimension
                D.
            kv_dtype: dtype in which cache slots are to store them.
        """
        return cls(states_1GTD.shape[1], states_1GTD.shape[3], states_1GTD.dtype, states_1GTD.device, kv_dtype)

    @property
    def as_given(self) -> bool:
        """Whether cache slots store keys and values as the model computes them, and not quantised."""
        return self.kv_dtype is KVDtype.AUTO

    @property
    def slot_bytes(self) -> int:
        """Bytes that the keys, or the values, of one token take in one layer."""
        return self.heads * (self.dim * self.dtype.itemsize if self.as_given else self.dim + SCALE_BYTES)

    def allocated(self, count: int, slots: int, zeroed: bool) -> torch.Tensor:
        """Allocate cache slots for keys or values of this kind (size, dtype and device).

        Args:
            count: number of key and value tensors of this kind in all layers; a layer has one of keys and one of
                values.
            slots: number of slots, one for each token.
            zeroed: whether the slots must hold zeros at first; False: they hold anything.

        Returns:
            (count, G, slots, D) in the model's dtype, with G KV heads of dimension D; if keys and values are quantised,
            int8 rows as in `lp.models.quantised_kv` in the place of D numbers.

        Raises:
            RuntimeError: the device has no room for the slots.
        """
        size, dtype = (self.dim, self.dtype) if self.as_given else (self.dim + SCALE_BYTES, torch.int8)
        allocate = torch.zeros if zeroed else torch.empty
        return allocate((count, self.heads, slots, size), dtype=dtype, device=self.device)

    def stored(self, states_1GTD: torch.Tensor) -> torch.Tensor:
        """Turn keys or values into what cache slots store: the tensor itself, or rows of quantised numbers.

        Args:
            states_1GTD: keys or values as the model computes them, (1, G, T, D): G KV heads, T tokens, head dimension
                D.
        """
        return states_1GTD if self.as_given else quantised(states_1GTD, self.kv_dtype)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Turn what cache slots store into keys or values for attention: the tensor itself, or a dequantised copy.

        Args:
            slots: content of slots, as `stored` makes it: (..., D), D the head dimension, or rows of quantised numbers.

        Returns:
            Keys or values (..., D), in the model's dtype.
        """
        return slots if self.as_given else dequantised(slots, self.kv_dtype, self.dtype)


@dataclass(slots=True)
class _Extent:
    """What a cache shares with its layers: if they referred to the cache, both would wait for Python's cycle collector.

    Attributes:
        layers: how many layers the model has.
        capacity: C.
        zeroed: slots hold zeros until something is written.
        known: how many keys and values of each kind the model has; the first cache of a model finds out.
        kv_dtype: how slots store keys and values.
        length: L.
        slot_mapping_T: the slots that a captured step writes its KV to.
        buffers: by kind, (n, G, C, D) each.
        pool: by kind, the pool's tensor, of which the buffers are the slots from `first_slot` on; empty without a pool.
        first_slot: number of the pool's slot where the buffers begin.
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
        """Give one more layer its keys, or its values; returns their index among all of the kind."""
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
        """The buffer of the keys or values with this index among all of the kind, (1, G, C, D): a view."""
        for buffer in self.buffers[kind]:
            if index < len(buffer):
                return buffer[index : index + 1]
            index -= len(buffer)
        raise AssertionError("nobody claimed it")


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one layer in a cache of fixed size, of which attention gets views.

    In a captured step a view has all slots of the cache; otherwise it has the prefix and the tokens of the pass.
    """

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
        """Look up the layer's part of the cache's buffers again, after the buffers have moved in memory."""
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
        """Write the new keys and values of several sequences to the pool that all their caches lie in.

        Args:
            slots_T: int64, the slot of the pool that each token is written to.
            key_states, value_states: (1, G, T, D): G KV heads, T tokens of all sequences together, head dimension D.
        """
        stored = self._stored(key_states, value_states)
        for (kind, index), states in zip(self._claimed, stored, strict=True):
            self.extent.pool[kind][index].index_copy_(1, slots_T, states[0])

    def first(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the first slots, for attention; dequantised if need be.

        Returns:
            Keys, and values: (1, G, num_slots, D) each, G KV heads of dimension D.
        """
        assert self.keys is not None and self.values is not None
        (of_keys, _), (of_values, _) = self._claimed
        return of_keys.read(self.keys[:, :, :num_slots]), of_values.read(self.values[:, :, :num_slots])

    def _stored(self, *keys_and_values: torch.Tensor) -> list[torch.Tensor]:
        """What slots store for these keys and values."""
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
        """Do nothing: the buffers stay, and `StaticKVCache.clear` discards the tokens in them."""


class StaticKVCache(Cache):
    """The KV cache of one sequence, in buffers of fixed size.

    A forward pass writes the KV of its tokens after the prefix (the committed tokens). `commit` then makes the accepted
    tokens part of the prefix.

    Args:
        num_layers: decoder layers of the model.
        capacity: C, cache slots; the prefix and the tokens of a step must fit into them together.
        zeroed: whether slots that were never written hold zeros. Attention that reads whole buffers needs that, since a
            mask does not hide a NaN.
        deferred: whether slots that a commit has to move are left to the next captured step, which takes them with
            `take_moves`. Before anything else reads or writes the cache, `flush` moves them.
        known: how many key and value tensors of each kind all layers have, by which buffers are allocated; the first
            cache of a model fills it in.
        kv_dtype: dtype in which slots store keys and values.

    Attributes:
        capacity: C, cache slots.
        length: L, number of committed tokens.
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
        """Number of committed tokens, L, which make up the prefix."""
        return self._extent.length

    @length.setter
    def length(self, num_tokens: int) -> None:
        self._extent.length = num_tokens

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The memory of all keys and values: tensors (n, G, C, D), each for keys and values of one kind.

        n counts the keys and values in all layers; layers that share another layer's are not counted. G: KV heads, C:
        cache slots, D: head dimension.
        """
        return [buffer for buffers in self._extent.buffers.values() for buffer in buffers]

    @property
    def claimed(self) -> bool:
        """Whether the layers have taken their parts of the buffers, which they do in the cache's first forward pass."""
        return bool(self._extent.claimed)

    def allocate(self) -> None:
        """Allocate the buffers of all layers now, not in the first pass, if an earlier cache has shown their sizes.

        Raises:
            CacheTooLarge: the device has no room for the buffers.
        """
        extent = self._extent
        for kind, count in extent.known.items():
            try:
                extent.buffers[kind] = [kind.allocated(count, extent.capacity, extent.zeroed)]
            except RuntimeError as error:  # of CUDA it is an OutOfMemoryError
                raise CacheTooLarge(slot_bytes(extent.known), extent.capacity) from error

    def lie_in(self, pool: Mapping[StatesKind, torch.Tensor], first_slot: int, num_slots: int) -> None:
        """Use some slots of a pool as this cache's buffers, from now on.

        Nothing is copied. The pool calls this for a new cache, and once it has moved or freed some of a cache's slots.

        Args:
            pool: the pool's tensor for each kind of keys or values, (n, G, slots of the pool, D): n keys and values in
                all layers, G KV heads, head dimension D.
            first_slot: number of the first slot of the pool that this cache uses, from 0.
            num_slots: number of neighbouring slots that it uses.
        """
        extent = self._extent
        extent.buffers = {kind: [buffer[:, :, first_slot : first_slot + num_slots]] for kind, buffer in pool.items()}
        extent.pool, extent.first_slot = pool, first_slot
        for layer in self.layers:
            layer.rebind()

    @property
    def pool(self) -> Mapping[StatesKind, torch.Tensor]:
        """The tensors of the pool that this cache lies in, by kind of keys or values; empty: it lies in no pool."""
        return self._extent.pool

    @property
    def first_slot(self) -> int:
        """Number of the pool's slot at which this cache begins; 0 where it lies in no pool."""
        return self._extent.first_slot

    def first(self, num_tokens: int) -> list[torch.Tensor]:
        """Keys and values of the first tokens, for another cache that begins with the same tokens (`begin_with`).

        Returns:
            A view of each buffer, (n, G, num_tokens, D): n keys and values in all layers, G KV heads, head dimension D,
            or rows of quantised numbers.
        """
        self.flush()
        return [buffer[:, :, :num_tokens] for buffer in self.buffers]

    def begin_with(self, states: Sequence[torch.Tensor], num_tokens: int) -> None:
        """Copy the first tokens of another cache into this one, which is empty, so that they are not computed again.

        Args:
            states: keys and values that `first(num_tokens)` of the other cache returned, one tensor for each buffer.
            num_tokens: number of tokens to copy.
        """
        assert not self.length
        for own, theirs in zip(self.buffers, states, strict=True):
            own[:, :, :num_tokens] = theirs
        self.length = num_tokens

    def clear(self) -> None:
        """Discard all tokens, for the next sequence.

        With `zeroed` the buffers are filled with zeros, so that no NaN of the last sequence stays in them.
        """
        self.length = 0
        self._moves = ([], [])
        if self._extent.zeroed:
            for buffer in self.buffers:
                buffer.zero_()

    def begin(self, visible_TT: torch.Tensor | np.ndarray | None) -> None:
        """Tell the cache which tokens of the next forward pass see which: recurrent states need that, keys do not.

        Args:
            visible_TT: bool; [i, j]: token i of the pass sees token j. None: each token sees all before it, and all
                tokens will be committed.
        """

    def begin_replay(self, num_tokens: int) -> None:
        """Tell the cache that a captured step is replayed next, since a replay does not call `begin`.

        Args:
            num_tokens: tokens of the step, padding included.
        """

    @property
    def slot_mapping(self) -> torch.Tensor | None:
        """The slot that each token of a captured step is written to, int64 (T,); None outside `writing_to`'s block."""
        return self._extent.slot_mapping_T

    def whole(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values in all slots of a layer, for a kernel that writes to the slots itself.

        Returns:
            Keys, and values: (1, G, C, D) each, G KV heads, C slots, head dimension D. None as long as the layer has no
            buffers, and where slots store quantised numbers.
        """
        states: PreallocatedLayer = self.layers[layer]
        as_given = self._extent.kv_dtype is KVDtype.AUTO
        return states.first(self.capacity) if as_given and states.is_initialized else None

    @contextmanager
    def writing_to(self, slot_mapping_T: torch.Tensor) -> Iterator[None]:
        """Context manager for a captured step: layers write KV to the given slots, and hand whole buffers to attention.

        Args:
            slot_mapping_T: int64, the slot of each token.
        """
        self._extent.slot_mapping_T = slot_mapping_T
        try:
            yield
        finally:
            self._extent.slot_mapping_T = None

    def commit(self, token_indices: Sequence[int]) -> None:
        """Make these tokens of the last step part of the prefix, in this order, and discard the step's other tokens.

        Args:
            token_indices: indices into the step's tokens, such as [0, 2, 5].
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
        """Number of slots that the last commit left for the next step to move, to make accepted tokens neighbours."""
        return len(self._moves[0])

    def take_moves(self) -> tuple[list[int], list[int]]:
        """Give a captured step the moves that the last commit has left to it, to bring accepted tokens side by side.

        Returns:
            Slots to move from, and for each the slot to move to.
        """
        moves = self._moves
        self._moves = ([], [])
        return moves

    def flush(self) -> None:
        """Carry out at once the moves of slots that the last commit has left to the next step."""
        sources, targets = self.take_moves()
        if sources:
            for buffer, slots in self._slots(sources):
                buffer[:, :, targets[0] : targets[-1] + 1] = buffer[:, :, slots]

    def move(
        self, source_M: torch.Tensor, target_M: torch.Tensor, by_kernel: Callable[..., None] | None = None
    ) -> None:
        """Move KV between slots within a captured step, which reads the slot numbers anew each time it is replayed.

        Args:
            source_M, target_M: int64, slots to move from and to. Within one sequence they ascend, and no target is
                greater than its source. Padding comes last and moves a slot to itself.
            by_kernel: `lp.models.layer_kernels.move_slots`; None: torch's operations move the slots.
        """
        for buffer in self.buffers:
            if by_kernel is None:
                buffer.index_copy_(2, target_M, buffer.index_select(2, source_M))
            else:
                by_kernel(buffer, source_M, target_M)

    def pack(self, token_indices: Sequence[int]) -> torch.Tensor:
        """Pack the keys and values of these tokens into one flat tensor, for the caches of other ranks to `append`.

        Args:
            token_indices: indices into the tokens of the last step.
        """
        device = self.buffers[0].device
        slots_of = self._slots([self.length + index for index in token_indices])
        return torch.cat([buffer[:, :, slots].flatten().to(device) for buffer, slots in slots_of])

    def append(self, packed: torch.Tensor, num_tokens: int) -> None:
        """Add tokens that another rank computed: write their keys and values after the prefix, and commit them.

        Args:
            packed: what `pack` of the other rank's cache returned.
            num_tokens: number of tokens in it.
        """
        self.flush()
        offset = 0
        for buffer in self.buffers:
            states = buffer[:, :, self.length : self.length + num_tokens]
            states.copy_(packed[offset : offset + states.numel()].view(states.shape))
            offset += states.numel()
        self.length += num_tokens

    def nbytes(self) -> int:
        """Bytes of memory that the cache takes."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def _slots(self, slots: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each buffer, with these slot numbers as a tensor on its device."""
        for buffer in self.buffers:
            yield buffer, to_device(slots, buffer.device)


def slot_bytes(kinds: Mapping[StatesKind, int]) -> int:
    """Bytes that one cache slot, which holds one token, takes in all layers together.

    Args:
        kinds: how many key and value tensors of each kind (size, dtype, device) all layers have.
    """
    return sum(count * kind.slot_bytes for kind, count in kinds.items())
