"""Cache slots that several sequences share: each has a run of them, one slot behind the other.

All keys and values of one kind lie in one tensor, (n, G, C, D) as in `lp.models.kv_cache`, and the cache of a sequence
is a view of its run. Attention reads a view as it reads a cache of its own, whatever the backend; blocks of slots
anywhere, with a table, would have to be gathered in each layer wherever the kernel knows no tables. What blocks are
for is had otherwise: a sequence is admitted with all the slots that it may need, and where no run is large enough
though enough slots are free, the sequences are moved together, which costs about as much as one step reads.

C: slots of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from lp.models.kv_cache import CacheTooLarge, StatesKind, StaticKVCache, slot_bytes


class Run(NamedTuple):
    """Slots from `start` on, `size` of them."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """Number of the slot right behind the last one."""
        return self.start + self.size


class Runs:
    """Which slots are free.

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
        """The smallest free run that has so many slots, or its first part; None where there is none."""
        fitting = [run for run in self._free if run.size >= size]
        if not fitting:
            return None
        found = min(fitting, key=lambda run: run.size)
        self._free.remove(found)
        self._add(Run(found.start + size, found.size - size))
        return Run(found.start, size)

    def give_back(self, run: Run) -> None:
        """Take back slots, which are free again."""
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
    """Caches for several sequences, in one tensor of each kind.

    Args:
        kinds: how many keys and values of each kind the model has.
        capacity: C.
        new_cache: a cache of so many slots, whose buffers are yet to be given.
        spare: further slots behind them, which no cache gets.
        zeroed: slots that no cache has hold zeros, for readers of all slots: a mask does not hide a NaN.

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
        """A cache of all slots, whichever cache has them, and the spare ones."""
        cache = self._new_cache(self.num_slots)
        cache.lie_in(self._buffers, 0, self.num_slots)
        return cache

    @property
    def free(self) -> int:
        """Slots that no cache has."""
        return self._runs.free

    def allocate(self, slots: int) -> StaticKVCache | None:
        """An empty cache of so many slots; None where fewer are free."""
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
        """The slots of a cache, which is of no more use."""
        self._free(self._caches.pop(cache))

    def shrink(self, cache: StaticKVCache, slots: int) -> None:
        """Give back the slots of a cache but the first ones, and forget what is cached in the others."""
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
        """Assert that every slot is free or of one cache: an invariant, for tests."""
        runs = sorted([*self._runs._free, *self._caches.values()])
        ends = [0, *(run.end for run in runs)]
        assert [run.start for run in runs] == ends[:-1], f"slots are lost or had twice: {runs}"
        assert ends[-1] == self.capacity, f"slots are lost at the end: {runs}"

    def _views(self, run: Run) -> dict[StatesKind, torch.Tensor]:
        return {kind: buffer[:, :, run.start : run.end] for kind, buffer in self._buffers.items()}

    def _move_together(self) -> None:
        """Move all caches to the first slots, in their order: of each only what is cached, as far as it must."""
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
