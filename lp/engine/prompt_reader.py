"""A prompt is cached chunk by chunk, and the draft source learns from its top-k logits.

V: vocabulary, K: top-k logits of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lp.draft.source import DraftSource
from lp.engine.failures import Failures
from lp.engine.step_sampler import StepSampler
from lp.models.kv_cache import StaticKVCache
from lp.models.prompt_images import PromptImages
from lp.models.runner import ModelRunner
from lp.models.tree_pass import TreePass
from lp.parallel.context import ParallelContext
from lp.sampling.top_logits import unpack_top_logits


class PromptReader:
    """Caches one prompt.

    Args:
        prompt: token ids; the last one, `c`, is computed by the first step.
        runner: gives the passes.
        context: who this rank is, and which ranks share its steps.
        step_sampler: takes the top-k logits.
        source: learns from them.
        num_logits: K; 0 where the source does not learn from them.
        num_cached: the prompt's first tokens, which were cached before.
        failures: what fails on this rank alone.
        images: images of the prompt; None for none.
        adapter: name of the LoRA adapter that the text has chosen; None for none.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        runner: ModelRunner,
        context: ParallelContext,
        step_sampler: StepSampler,
        source: DraftSource,
        num_logits: int,
        num_cached: int,
        failures: Failures,
        images: PromptImages | None = None,
        adapter: str | None = None,
    ) -> None:
        self.prompt = prompt
        self.runner = runner
        self.context = context
        self.step_sampler = step_sampler
        self.source = source
        self.num_logits = num_logits
        self.num_cached = max(num_cached, images.end) if images else num_cached
        self.images = images
        self.adapter = adapter
        self.failures = failures
        self._packed: list[torch.Tensor] = []  # top-k logits of the chunks that are cached so far

    def is_cached(self, cache: StaticKVCache) -> bool:
        """Whether the cache has the whole prompt, but for its last token, which the first step computes."""
        return cache.length >= len(self.prompt) - 1

    def lacks_images(self, cache: StaticKVCache) -> bool:
        """Whether `read_images` is to come first."""
        return self.images is not None and cache.length < self.images.end

    def takes_chunks(self, cache: StaticKVCache) -> bool:
        """Whether `next_chunk` comes next."""
        return not self.is_cached(cache) and not self.lacks_images(cache)

    def read_images(self, cache: StaticKVCache) -> None:
        """Cache the prompt up to the end of its images.

        Args:
            cache: the text's cache, which is empty.
        """
        images = self.images
        assert images is not None and not cache.length
        self.failures.attempt(lambda: self.runner.read_images(self.prompt, images, cache))
        cache.length = images.end  # as on the other ranks, if it failed: the message of the first step tells them

    def chunk_size(self, cache: StaticKVCache, room: int) -> int:
        """How many tokens the next pass caches, if it has room for so many; 0: none is left."""
        return self.runner.prompt_chunk(len(self.prompt) - 1 - cache.length, room)

    def next_chunk(self, cache: StaticKVCache, count: int) -> TreePass:
        """The pass that caches so many more tokens."""
        num_logits = count if self.num_logits else 0
        tree = self.runner.prompt_pass(self.prompt, len(self.prompt) - 1, cache.length, count, cache, num_logits)
        return tree._replace(rotary_offset=self.images.rotary_offset if self.images else 0, adapter=self.adapter)

    def take_chunk(self, cache: StaticKVCache, count: int, logits: torch.Tensor, failure: Exception | None) -> None:
        """Take in so many tokens.

        Args:
            cache: the cache that the pass has written to.
            count: how many.
            logits: (count, V), where the source learns from them.
            failure: why there are none.
        """

        def take() -> None:
            if failure:
                raise failure
            if self.num_logits:
                self._packed.append(self.step_sampler.top_logits(logits, self.prompt, self.num_logits))
            cache.commit(range(count))

        end = cache.length + count
        try:
            self.failures.attempt(take)
        finally:
            # Raised there, it has this frame, which would keep it and the cache until gc finds the cycle.
            failure = None
        cache.length = end  # as on the other ranks, if it failed: the message of the first step tells them
        if self.is_cached(cache):
            self._begin_source()
            self._packed = []

    def _begin_source(self) -> None:
        """Show the source the prompt's top-k logits: rank 0's on every rank, since ranks may round them differently."""
        first = self.num_cached
        count = len(self.prompt) - 1 - first
        if not self.num_logits or count <= 0:
            return
        if self.failures.failure:
            mine = torch.zeros(count, self.num_logits, dtype=torch.int64, device=self.runner.device)
        else:
            mine = torch.cat(self._packed)
        logits = unpack_top_logits(self.context.on_host(self.context.steps.broadcast(mine, 0)).numpy())
        self.source.begin(self.prompt[first:], logits)
