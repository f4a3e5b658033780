"""The KV caches that an engine gives its sequences (prompt and generated tokens), as slots of one preallocated pool.

When a sequence has ended, its cache is kept for prompts that begin with the same tokens, until the slots are needed.

Replayed CUDA graphs read the one cache that they were captured with, the static cache. A sequence that runs alone uses
that cache, if there are such graphs, until other sequences join it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lp.engine.prefixes import CachedText, Prefixes
from lp.engine.request import Request
from lp.models.fused import model_state
from lp.models.kv_cache import StaticKVCache
from lp.models.kv_pool import KVPool
from lp.models.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """The static cache of the CUDA graphs, while one text uses it.

    Attributes:
        cache: the static cache.
        in_pool: the text's own slots in the pool, which it does not use meanwhile.
        until: closed when the text ends; that gives the static cache back to the runner.
    """

    cache: StaticKVCache
    in_pool: StaticKVCache
    until: ExitStack


class TextCaches:
    """Gives each sequence of an engine a KV cache, with the part of its prompt that an earlier sequence computed.

    Args:
        runner: runs the model, and has the static cache that its CUDA graphs read.
        pool: the cache slots that sequences share.
        reuse_prefixes: keep the caches of ended sequences, for prompts that begin with the same tokens.
    """

    def __init__(self, runner: ModelRunner, pool: KVPool, reuse_prefixes: bool) -> None:
        self.runner = runner
        self.pool = pool
        self._reuse_prefixes = reuse_prefixes
        self._prefixes = Prefixes(pool.give_back)
        self._borrowed: _Borrowed | None = None
        self._kv_made_by = self._makes_kv() if self.reuses else None

    @property
    def reuses(self) -> bool:
        """Whether prompts may reuse the KV of earlier sequences: if that was asked for, and is exact for this model."""
        return self._reuse_prefixes and self.runner.takes_forests

    def follow_model(self) -> bool:
        """Before a sequence begins, note changes to the model, such as another active adapter or other weights.

        Returns:
            Whether kept prefixes must not be reused, because the model, or under `exact="bitwise"` the number of
            threads, has changed since their KV was computed.
        """
        self.runner.follow()
        if not self.reuses or (made_by := self._makes_kv()) == self._kv_made_by:
            return False
        self._kv_made_by = made_by
        return True

    def _makes_kv(self) -> tuple[Any, ...]:
        """What a prompt's KV depends on besides its tokens: the model, and under `exact="bitwise"` torch's threads."""
        return model_state(self.runner.model), self.runner.asked_threads

    def clear_prefixes(self) -> None:
        """Free the caches of all sequences that have ended, so that no later prompt reuses their KV."""
        self._prefixes.clear()

    def has_room(self, slots: int) -> bool:
        """Whether a sequence that needs up to `slots` cache slots (one for each token) can begin now."""
        return self.available >= slots

    @property
    def available(self) -> int:
        """Number of cache slots that new sequences can get: free ones, and those kept for reuse, which can be freed."""
        return self.pool.free + self._prefixes.slots

    def take(
        self, slots: int, request: Request, running: Callable[[], Iterable[CachedText]]
    ) -> tuple[StaticKVCache, int]:
        """Allocate a cache for a new sequence, and copy into it the longest prefix of its prompt in another cache.

        Args:
            slots: cache slots that the sequence needs; call `has_room` first.
            request: the request that the sequence is for.
            running: lists the sequences that still run, whose caches may be copied from, too.

        Returns:
            The cache, and the number of prompt tokens that it has already.
        """
        source, count = None, 0
        if self.reuses and request.kept_for is not None:
            source, count = self._prefixes.longest(request.keyed(request.prompt)[:-1], running(), request.kept_for)
        if request.images and count < request.images.end:  # which are one pass
            source, count = None, 0
        while self.pool.free < slots and self._prefixes.drop_oldest(but=source):
            pass
        states = None
        if source is not None and self.pool.free < slots:  # the text gets the slots of its own prefix, too
            states = [states.clone() for states in source.cache.first(count)]
            self._prefixes.clear()
        cache = self.pool.allocate(slots)
        assert cache is not None
        if source is not None:
            cache.begin_with(states or source.cache.first(count), count)
        return cache, count

    def captured(self, cache: StaticKVCache) -> StaticKVCache:
        """Let a sequence that begins alone use the static cache that CUDA graphs read, so that its steps are replayed.

        The sequence keeps its slots in the pool, so that slots are given out alike on ranks that have no CUDA graphs.
        When other sequences join, `in_pool` moves it into these slots if steps over several sequences are captured.
        Otherwise it stays in the static cache, and its steps are launched one operation at a time.

        Args:
            cache: the sequence's cache in the pool; the tokens in it are copied.

        Returns:
            The static cache; or `cache` itself if there is no static cache or another sequence uses it.
        """
        runner = self.runner
        if runner.captured is None or runner.captured.reserved:
            return cache
        with ExitStack() as stack:
            captured = stack.enter_context(runner.borrowed_cache(cache.capacity))
            if runner.captures(captured):
                if cache.length:
                    captured.begin_with(cache.first(cache.length), cache.length)
                self._borrowed = _Borrowed(captured, cache, stack.pop_all())
                return captured
        return cache

    def in_pool(self, cache: StaticKVCache) -> StaticKVCache | None:
        """Move a sequence from the static cache of the CUDA graphs into its own slots in the pool, when others join it.

        Graphs of steps over several sequences read only the pool. The static cache stays reserved until the sequence
        ends, along with the memory that its sampler draws noise into.

        Args:
            cache: the cache that the sequence uses now.

        Returns:
            The sequence's cache in the pool; None if `cache` is not the static cache.
        """
        borrowed = self._borrowed
        if borrowed is None or cache is not borrowed.cache:
            return None
        self._copy_to_pool(borrowed, cache.length)
        return borrowed.in_pool

    def give_back(
        self,
        cache: StaticKVCache,
        tokens: Sequence[int] = (),
        error: BaseException | None = None,
        owner: str = "",
    ) -> None:
        """Take back the cache of a sequence that has ended: keep it for prompts that begin alike, or free it.

        Args:
            cache: the sequence's cache, in the pool or the static one.
            tokens: ids of the sequence's first tokens, whose KV to keep for later prompts; if empty, the cache is
                freed.
            error: the exception that the sequence failed with; None if it did not fail.
            owner: name of the sequence's owner: only prompts of that owner reuse the cache.
        """
        borrowed = self._borrowed
        if borrowed is not None and cache in (borrowed.cache, borrowed.in_pool):
            self._borrowed = None
            if cache is borrowed.cache:
                self._copy_to_pool(borrowed, len(tokens))
            if error is None:
                borrowed.until.close()
            else:
                borrowed.until.__exit__(type(error), error, error.__traceback__)
            cache = borrowed.in_pool
        if not tokens:
            self.pool.give_back(cache)
            return
        self.pool.shrink(cache, len(tokens))
        self._prefixes.keep(tokens, cache, owner)

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the static cache of the CUDA graphs back to the runner, if a sequence still uses it.

        Args:
            kind, error, traceback: the arguments of the engine's `__exit__`; None if no exception ends the engine.
        """
        borrowed, self._borrowed = self._borrowed, None
        if borrowed:
            borrowed.until.__exit__(kind, error, traceback)

    def _copy_to_pool(self, borrowed: _Borrowed, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens from the static cache of the CUDA graphs into the text's own slots."""
        borrowed.in_pool.length = 0
        if num_tokens:
            borrowed.in_pool.begin_with(borrowed.cache.first(num_tokens), num_tokens)
