"""Caches of an engine's texts: slots of its pool, kept for reuse when a text has ended.

A text that begins alone takes the cache of captured steps, where there is one, until others join it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from lp.engine.prefixes import CachedText, Prefixes
from lp.engine.request import Request
from lp.models.fused import model_state
from lp.models.kv_cache import StaticKVCache
from lp.models.kv_pool import KVPool
from lp.models.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """The cache of captured steps, which one text has.

    Attributes:
        cache: the cache of captured steps.
        in_pool: the text's own slots in the pool.
        until: closed at the end of the text, which gives the cache back to the runner.
    """

    cache: StaticKVCache
    in_pool: StaticKVCache
    until: ExitStack


class TextCaches:
    """Hands out caches for texts, and takes them back.

    Args:
        runner: runs the model, and has the cache of captured steps.
        pool: the cache slots that texts share.
        reuse_prefixes: keep the caches of texts that have ended, for prompts that begin like them.
    """

    def __init__(self, runner: ModelRunner, pool: KVPool, reuse_prefixes: bool) -> None:
        self.runner = runner
        self.pool = pool
        self._reuse_prefixes = reuse_prefixes
        self._prefixes = Prefixes(pool.give_back)
        self._borrowed: _Borrowed | None = None
        self._model_state = model_state(runner.model) if self.reuses else None

    @property
    def reuses(self) -> bool:
        """Whether prompts may begin behind a prefix that is cached."""
        return self._reuse_prefixes and self.runner.takes_forests

    def follow_model(self) -> bool:
        """Before a text begins, take up what has changed on the model; whether prefixes are of another one since."""
        self.runner.follow()
        if not self.reuses or (state := model_state(self.runner.model)) == self._model_state:
            return False
        self._model_state = state  # of another adapter, or other weights
        return True

    def clear_prefixes(self) -> None:
        """Forget the texts that have ended."""
        self._prefixes.clear()

    def has_room(self, slots: int) -> bool:
        """Whether a text that may need so many slots can begin."""
        return self.available >= slots

    @property
    def available(self) -> int:
        """Slots that texts to come may have: those that none has, and those kept for prompts that begin alike."""
        return self.pool.free + self._prefixes.slots

    def take(
        self, slots: int, request: Request, running: Callable[[], Iterable[CachedText]]
    ) -> tuple[StaticKVCache, int]:
        """A cache for a text, and how many tokens of its prompt are cached there.

        Args:
            slots: how many the text needs; `has_room` has said that there are as many.
            request: whose prompt it is.
            running: gives texts whose caches may be copied, besides those that have ended.
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
        """The cache of captured steps for a text that begins by itself, where there is one and nobody has it.

        Its slots in the pool stay its own, so that they are the same on ranks that do not capture. In company it
        goes on there if steps of several texts are captured, else with this cache, uncaptured.

        Args:
            cache: the text's cache in the pool; what it has is copied.
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
        """Copy what a text has in the cache of captured steps into its own slots of the pool, and give these.

        None where it is not in that cache. Captured steps of several texts read the pool alone. The cache that it
        leaves stays reserved, with the memory that its sampler draws noise into.
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
        """Take back the cache of a text that has ended.

        Args:
            cache: the cache that the text had, which may be that of captured steps.
            tokens: first tokens of the text, whose slots are kept; none: the slots are free again.
            error: what the text ended with, if it failed.
            owner: whose text it is.
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
        """Let go of the cache of captured steps, if a text still has it. Takes the arguments of `__exit__`."""
        borrowed, self._borrowed = self._borrowed, None
        if borrowed:
            borrowed.until.__exit__(kind, error, traceback)

    def _copy_to_pool(self, borrowed: _Borrowed, num_tokens: int) -> None:
        """Copy so many tokens from the cache of captured steps into the text's own slots."""
        borrowed.in_pool.length = 0
        if num_tokens:
            borrowed.in_pool.begin_with(borrowed.cache.first(num_tokens), num_tokens)
