"""Cache slots that several sequences share: each sequence has a run of neighbouring slots.

All keys and values of one kind lie in one tensor, (n, G, C, D) as in `lp.models.kv_cache`, and the cache of a sequence
is a view of its run. Attention reads this view as it reads a cache in memory of its own, whatever the backend.
Scattered blocks with a block table would have to be gathered in each layer wherever the kernel does not read tables.
What blocks are good for is had in another way: a sequence is admitted with all the slots that it may need. Where enough
slots are free but no run is large enough, the sequences are moved together, which costs about as much as the reads of
one step.

C: slots of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from lp.models.kv_cache import CacheTooLarge, StatesKind, StaticKVCache, slot_bytes


class Run(NamedTuple):
    """Neighbouring slots of a pool.

    Attributes:
        start: number of the first slot, from 0.
        size: how many slots.
    """

    start: int
    size: int

    @property
    def end(self) -> int:
        """Number of the slot right after the last one."""
        return self.start + self.size


class Runs:
    """Keeps track of which slots of a pool are free.

    Args:
        capacity: C, slots of the pool.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = [Run(0, capacity)]  # ascending, none beside another

    @property
    def free(self) -> int:
        """Number of free slots."""
        return sum(run.size for run in self._free)

    def take(self, size: int) -> Run | None:
        """Take so many neighbouring slots from the smallest free run that is long enough; None where no run is."""
        fitting = [run for run in self._free if run.size >= size]
        if not fitting:
            return None
        found = min(fitting, key=lambda run: run.size)
        self._free.remove(found)
        self._add(Run(found.start + size, found.size - size))
        return Run(found.start, size)

    def give_back(self, run: Run) -> None:
        """Make slots free again, and join them with the free slots beside them."""
        if not run.size:
            return
        beside = [other for other in self._free if other.end == run.start or other.start == run.end]
        for other in beside:
            self._free.remove(other)
        start = min(run.start, *(other.start for other in beside)) if beside else run.start
        self._add(Run(start, run.size + sum(other.size for other in beside)))

    def _add(self, run: Run) -> None:
        if run.size:
            self._free = sorted([*self._free, run])


class KVPool:
    """The KV cache slots of all sequences that are decoded together, from which each sequence gets its own cache.

    Args:
        kinds: how many key and value tensors of each kind (size, dtype, device) all layers of the model have.
        capacity: C, slots for sequences.
        new_cache: given a number of slots, makes a cache without buffers; the pool then gives it its slots.
        spare: further slots after those, which no sequence gets: captured steps write padding to them.
        zeroed: whether slots that no cache has hold zeros. Attention that reads all slots needs that, since a mask does
            not hide a NaN.

    Raises:
        CacheTooLarge: the device has no room for the slots.
    """

    def __init__(
        self,
        kinds: Mapping[StatesKind, int],
        capacity: int,
        new_cache: Callable[[int], StaticKVCache],
        spare: int = 0,
        zeroed: bool = False,
    ) -> None:
        self.capacity = capacity
        self.num_slots = capacity + spare
        self._zeroed = zeroed
        self._new_cache = new_cache
        self._runs = Runs(capacity)
        self._caches: dict[StaticKVCache, Run] = {}
        try:
            self._buffers = {kind: kind.allocated(count, self.num_slots, zeroed) for kind, count in kinds.items()}
        except RuntimeError as error:  # of CUDA it is an OutOfMemoryError
            raise CacheTooLarge(slot_bytes(kinds), capacity) from error

    def __contains__(self, cache: StaticKVCache) -> bool:
        return cache in self._caches

    def whole(self) -> StaticKVCache:
        """Make a cache over all slots, those of every sequence and the spare ones, for captured steps to use."""
        cache = self._new_cache(self.num_slots)
        cache.lie_in(self._buffers, 0, self.num_slots)
        return cache

    @property
    def free(self) -> int:
        """Number of slots that no sequence has."""
        return self._runs.free

    def allocate(self, slots: int) -> StaticKVCache | None:
        """Make an empty cache of so many slots for one sequence; None where fewer slots are free.

        Other sequences are moved together if the free slots do not lie side by side.
        """
        run = self._runs.take(slots)
        if run is None and self._runs.free >= slots:
            self._move_together()
            run = self._runs.take(slots)
        if run is None:
            return None
        cache = self._new_cache(slots)
        self._caches[cache] = run
        cache.lie_in(self._buffers, *run)
        return cache

    def give_back(self, cache: StaticKVCache) -> None:
        """Free the slots of a cache that is no longer used."""
        self._free(self._caches.pop(cache))

    def shrink(self, cache: StaticKVCache, slots: int) -> None:
        """Keep only the first slots of a cache, and free its other slots with the tokens in them.

        Args:
            cache: a cache of this pool.
            slots: number of slots to keep, all of which hold committed tokens.
        """
        run = self._caches[cache]
        with torch.inference_mode():
            cache.flush()
        cache.length = slots
        kept = Run(run.start, slots)
        self._free(Run(kept.end, run.size - slots))
        self._caches[cache] = kept
        cache.lie_in(self._buffers, *kept)

    def _free(self, run: Run) -> None:
        self._runs.give_back(run)
        if self._zeroed:
            self._zero(run)

    def _zero(self, run: Run) -> None:
        with torch.inference_mode():
            for states in self._views(run).values():
                states.zero_()

    def check(self) -> None:
        """Assert that every slot is either free or used by exactly one cache; for tests."""
        runs = sorted([*self._runs._free, *self._caches.values()])
        ends = [0, *(run.end for run in runs)]
        assert [run.start for run in runs] == ends[:-1], f"slots are lost or had twice: {runs}"
        assert ends[-1] == self.capacity, f"slots are lost at the end: {runs}"

    def _views(self, run: Run) -> dict[StatesKind, torch.Tensor]:
        return {kind: buffer[:, :, run.start : run.end] for kind, buffer in self._buffers.items()}

    def _move_together(self) -> None:
        """Move the committed tokens of all caches to the lowest slots, in order, so that free slots are neighbours."""
        start = 0
        for cache, run in sorted(self._caches.items(), key=lambda item: item[1]):
            if run.start != start:
                target = Run(start, run.size)
                cache.flush()
                for kind, before in self._views(run).items():
                    kept = before[:, :, : cache.length].clone()  # the runs may overlap
                    self._views(target)[kind][:, :, : cache.length] = kept
                if self._zeroed:  # what was never committed may be a NaN, wherever it lies by now
                    self._zero(Run(start + cache.length, run.end - start - cache.length))
                cache.lie_in(self._buffers, *target)
                self._caches[cache] = target
            start += run.size
        self._runs = Runs(self.capacity)
        taken = self._runs.take(start)
        assert taken is not None and taken.start == 0
