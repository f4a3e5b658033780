"""Prefill: the forward passes that put a prompt into the KV cache, from whose logits the draft source may learn.

V: vocabulary, K: top-k logits of a token, n: tokens of a chunk whose logits are read.
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

# Number of tokens whose top-k logits are selected at once. Selection copies logits to float32: with a large vocabulary,
# copies for a whole chunk would take half a GB each.
ROWS = 128


class PromptReader:
    """Prefills one prompt, a chunk in each step, and gives the prompt's top-k logits to the draft source to learn from.

    Args:
        prompt: token ids. All but the last are prefilled; the first decode step computes the last one.
        runner: makes the inputs of the forward passes.
        context: who this rank is, and which ranks share its steps.
        step_sampler: selects the top-k logits.
        source: draft source that learns from the prompt's top-k logits.
        num_logits: K, number of top-k logits that are taken of a token.
        num_read: number of the prompt's last tokens whose logits the draft source learns from; 0: none.
        num_cached: number of the prompt's first tokens that are in the cache already, copied from an earlier sequence.
        failures: keeps exceptions of this rank for its next message.
        images: images in the prompt; None: there are none.
        adapter: name of the LoRA adapter for this request; None: the adapters that are active on the model.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        runner: ModelRunner,
        context: ParallelContext,
        step_sampler: StepSampler,
        source: DraftSource,
        num_logits: int,
        num_read: int,
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
        self._first_read = max(self.num_cached, len(prompt) - 1 - num_read)  # index of the first token that is read
        self._packed: list[torch.Tensor] = []  # top-k logits of the chunks that are cached so far

    def is_cached(self, cache: StaticKVCache) -> bool:
        """Whether the prompt is prefilled, except for its last token, which the first decode step computes."""
        return cache.length >= len(self.prompt) - 1

    def lacks_images(self, cache: StaticKVCache) -> bool:
        """Whether the prompt has images whose KV is not in the cache yet, so that `read_images` must come next."""
        return self.images is not None and cache.length < self.images.end

    def takes_chunks(self, cache: StaticKVCache) -> bool:
        """Whether a chunk of the prompt's tokens must be prefilled next, by `next_chunk` and `take_chunk`."""
        return not self.is_cached(cache) and not self.lacks_images(cache)

    def read_images(self, cache: StaticKVCache) -> None:
        """Prefill the prompt up to the end of its images, in one forward pass by the model's own code.

        Args:
            cache: the sequence's cache, which must be empty.
        """
        images = self.images
        assert images is not None and not cache.length
        self.failures.attempt(lambda: self.runner.read_images(self.prompt, images, cache))
        cache.length = images.end  # as on the other ranks, if it failed: the message of the first step tells them

    def chunk_size(self, cache: StaticKVCache, room: int) -> int:
        """Number of prompt tokens that the next forward pass is to prefill; 0: no tokens are left.

        Args:
            cache: the sequence's cache.
            room: most prompt tokens that the pass has room for.
        """
        return self.runner.prompt_chunk(len(self.prompt) - 1 - cache.length, room)

    def next_chunk(self, cache: StaticKVCache, count: int) -> TreePass:
        """Make the input of the forward pass that prefills the next chunk.

        Args:
            cache: the sequence's cache.
            count: number of prompt tokens in the chunk, from `chunk_size`.
        """
        num_read = min(max(cache.length + count - self._first_read, 0), count)
        tree = self.runner.prompt_pass(self.prompt, len(self.prompt) - 1, cache.length, count, cache, num_read)
        return tree._replace(rotary_offset=self.images.rotary_offset if self.images else 0, adapter=self.adapter)

    def take_chunk(self, cache: StaticKVCache, count: int, logits: torch.Tensor, failure: Exception | None) -> None:
        """Finish a chunk: commit its KV, and keep its top-k logits for the draft source.

        After the last chunk, the draft source learns from the logits that were read.

        Args:
            cache: the cache that the forward pass has written to.
            count: number of tokens in the chunk.
            logits: logits of its last tokens, those that the draft source learns from, (n, V).
            failure: exception of the forward pass; None if it succeeded.
        """
        end = cache.length + count

        def take() -> None:
            if failure:
                raise failure
            if end > self._first_read:
                for part in logits.split(ROWS):
                    self._packed.append(self.step_sampler.top_logits(part, self.prompt, self.num_logits))
            cache.commit(range(count))

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
        """Let the draft source learn from the prompt's top-k logits.

        Every rank takes rank 0's, since ranks may round logits differently and their sources must stay equal.
        """
        first = self._first_read
        count = len(self.prompt) - 1 - first
        if count <= 0:
            return
        if self.failures.failure:
            mine = torch.zeros(count, self.num_logits, dtype=torch.int64, device=self.runner.device)
        else:
            mine = torch.cat(self._packed)
        logits = unpack_top_logits(self.context.on_host(self.context.steps.broadcast(mine, 0)).numpy())
        self.source.begin(self.prompt[first:], logits)
