"""Cache slots that several sequences share: each sequence has a run of them, one slot behind the other.

All keys and values of one kind lie in one tensor, (n, G, C, D) as in `lp.models.kv_cache`, and the cache of a sequence
is a view of its run. Attention reads a view as it reads a cache of its own, whatever the backend; scattered blocks of
slots with a block table would have to be gathered in each layer wherever the kernel knows no tables. The benefit of
blocks is had otherwise: a sequence is admitted with all the slots that it may need, and where enough slots are free
but no run is large enough, the sequences are moved together, which costs about as much as one step reads.

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
        start: number of the first slot.
        size: how many slots.
    """

    start: int
    size: int

    @property
    def end(self) -> int:
        """Number of the slot right behind the last one."""
        return self.start + self.size


class Runs:
    """Keeps track of the free slots of a pool.

    Args:
        capacity: C.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = [Run(0, capacity)]  # ascending, none beside another

    @property
    def free(self) -> int:
        """Number of free slots."""
        return sum(run.size for run in self._free)

    def take(self, size: int) -> Run | None:
        """Take so many neighbouring slots, from the smallest free run that has as many; None where no run has."""
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
        kinds: how many keys and values of each kind the model has.
        capacity: C.
        new_cache: makes a cache of so many slots without buffers, which the pool then gives it.
        spare: further slots behind the others, which no sequence gets: captured steps write padding to them.
        zeroed: whether slots that no cache has hold zeros. Attention that reads all slots needs that, since a mask does
            not hide a NaN.

    Raises:
        CacheTooLarge: the device has no room.
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
        """A cache over all slots, whichever sequences have them, and the spare ones, for captured steps."""
        cache = self._new_cache(self.num_slots)
        cache.lie_in(self._buffers, 0, self.num_slots)
        return cache

    @property
    def free(self) -> int:
        """Number of slots that no sequence has."""
        return self._runs.free

    def allocate(self, slots: int) -> StaticKVCache | None:
        """An empty cache of so many slots for one sequence; None where fewer are free.

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
        """Free the slots of a cache that is of no more use."""
        self._free(self._caches.pop(cache))

    def shrink(self, cache: StaticKVCache, slots: int) -> None:
        """Keep only the first slots of a cache and free the others, with the tokens in them.

        Args:
            cache: a cache of this pool.
            slots: number of slots that it keeps, all of which hold committed tokens.
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
        """Assert that every slot is either free or used by exactly one cache: an invariant, for tests."""
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
