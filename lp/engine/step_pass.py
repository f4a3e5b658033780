"""What a rank's device does in a step: the forward pass, sampling, and the message to the other ranks.

n: sampled nodes, V: vocabulary, K: top-k logits of a node, P: int64s of a message, R: ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import torch

from lp.draft.layout import StepLayout
from lp.engine.captured_tail import CapturedTail
from lp.engine.sharded_sampling import ShardedSampling
from lp.models.captured_steps import CapturedStep
from lp.models.graph_recorder import CaptureFailed
from lp.models.kv_cache import StaticKVCache
from lp.models.runner import ModelRunner
from lp.models.sharded_layers import head_of
from lp.parallel.context import ParallelContext
from lp.parallel.message import (
    LENGTH,
    STOP,
    Header,
    MessageShape,
    Sampled,
    Stop,
    best_logits,
    known_part,
    pack,
)
from lp.sampling.sampler import Sampler
from lp.sampling.top_logits import pack_top_logits

logger = logging.getLogger(__name__)
MOST_TAILS = 8  # of one bucket, of samplers that differ in their settings; the oldest goes


class StepPass:
    """What the steps of one generation do on this rank's device, its part of a pass over several texts left out.

    A captured step is two graphs, the forward pass and the tail: sampling and the message. The host waits once, for the
    message. Where steps are not captured, or the sampler needs the host, the same is done by one operation at a time.

    Args:
        runner: computes forward passes, and knows the model.
        cache: of the generation.
        sampler: of the generation.
        context: the ranks.
        shape: of the messages.

    Attributes:
        joint_key: texts with the same one can be sampled together; None: not with any other.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: StaticKVCache,
        sampler: Sampler,
        context: ParallelContext,
        shape: MessageShape,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.sampler = sampler
        self.context = context
        self.shape = shape
        head = head_of(runner.model)
        self._sharded = ShardedSampling(head, sampler, context) if head else None
        self.joint_key = sampler.capture_key if self._sharded is None else None
        self._capture_key = sampler.capture_key if runner.captures(cache) else None
        self._shares_noise = False

    def capture(self, num_tokens: int, num_logits: Sequence[int]) -> None:
        """Capture steps of all buckets up to so many tokens, so that none is captured while text is generated.

        Args:
            num_tokens: of the largest step.
            num_logits: how many top-k logits steps may take of every node.
        """
        for step in self.runner.captured_steps(num_tokens, self.cache):
            if self._capture_key is not None and any(self._tail_key(k) not in step.tails for k in num_logits):
                logits_BV = step.run()
                for k in num_logits:
                    self._tail(step, logits_BV, k)
        if self.runner.captured and self.runner.captures(self.cache):
            self.runner.captured.settle()

    def replayed(
        self, layout: StepLayout, header: Header, text: Sequence[int], step_tokens: int, num_logits: int
    ) -> torch.Tensor:
        """This rank's message (P,) of a captured step: on the device, which may still be at it, or where it copies it.

        Args:
            layout: of the step.
            header: of the message.
            text: prompt and generated tokens.
            step_tokens: to pad the step to.
            num_logits: top-k logits that are taken of every node, at most K.
        """
        inputs = layout.step_tokens(step_tokens)
        logits_indices = layout.sampled_tokens
        step = self.runner.staged(*inputs, self.cache, logits_indices)
        if step is None:  # it is too large, or can't be captured
            tree = inputs.tokens, inputs.positions, inputs.visible()
            logits = self.runner.forward(*tree, self.cache, logits_indices, capture=False, whole=False)
            return self.message(logits, layout, header, text, num_logits)
        logits_BV = step.run()
        tail = self._tail(step, logits_BV, num_logits)
        if tail is None:
            return self.message(logits_BV[: len(logits_indices)], layout, header, text, num_logits)
        if self._sharded and tail.heads is not None:
            self._sharded.heads = tail.heads
        message = tail.run(known_part(header, layout, self.shape), *self._sampled_nodes(layout))
        return message if tail.on_host is None else tail.on_host

    def message(
        self,
        logits: torch.Tensor,
        layout: StepLayout,
        header: Header,
        text: Sequence[int],
        num_logits: int,
        sampled: Sampled | None = None,
    ) -> torch.Tensor:
        """This rank's message (P,), on its device.

        Args:
            logits: of the sampled nodes, (n, V).
            layout, header, text, num_logits: as of `replayed`.
            sampled: of these nodes, if they are sampled already.
        """
        if sampled is not None:
            return pack(header, layout, sampled, self.shape)
        if not self._sharded:
            return pack(header, layout, self._sampled(logits, layout, text, num_logits), self.shape)
        branches, drafts = self._branches(layout), self._drafts(layout)
        positions = layout.sampled_positions
        sampled, flags = self._sharded.sample(logits, positions, branches, drafts, text, num_logits, header)
        message = pack(header, layout, sampled, self.shape)
        message[STOP : LENGTH + 1] = flags
        return message

    def top_logits(self, logits: torch.Tensor, prompt: Sequence[int], num_logits: int) -> torch.Tensor:
        """The top-k logits of the prompt's tokens, packed: (n, num_logits).

        Args:
            logits: (n, V), of a divided model this rank's part of them.
        """
        if self._sharded:
            return self._sharded.top_logits(logits, self.sampler, prompt, num_logits)
        return pack_top_logits(self.sampler.scores(logits, [None] * len(logits), prompt), num_logits)

    def announced(self, error: Exception) -> bool:
        """Whether the ranks of this replica know of an error on this one, and wait for nothing."""
        return self._sharded is not None and self._sharded.failure is error

    def check_replicas(self, stop: Stop, step: int) -> None:
        """Refuse to go on where the ranks of some replica differ.

        Raises:
            RuntimeError: names them, or says that it is another replica's.
        """
        if Stop.PARTED in stop and self._sharded:
            self._sharded.check_alike(step)
            raise RuntimeError(f"the ranks of another replica differ from each other at step {step}; see their errors")

    def failed(self, header: Header, layout: StepLayout) -> torch.Tensor:
        """The message of a rank that has nothing to report but its header."""
        nothing = torch.zeros(len(layout.sampled_nodes), 0, dtype=torch.int64, device=self.runner.device)
        return pack(header, layout, Sampled(nothing.sum(1), nothing), self.shape)

    def _tail(self, step: CapturedStep, logits_BV: torch.Tensor, num_logits: int) -> CapturedTail | None:
        """The captured tail of a captured step; None if the sampler has none, or it can't be captured."""
        if self._capture_key is None:
            return None
        assert self.runner.captured
        if not self._shares_noise:
            self.sampler.share_noise(self.runner.captured.shared)
            self._shares_noise = True
        key = self._tail_key(num_logits)
        if key not in step.tails:
            if len(step.tails) == MOST_TAILS:
                del step.tails[next(iter(step.tails))]
            recorder = self.runner.captured.recorder
            compared = self.context.world_size > 1
            try:
                step.tails[key] = CapturedTail(
                    recorder, logits_BV, self.sampler, self.shape, num_logits, compared, not compared, self._sharded
                )
            except CaptureFailed as error:
                logger.info("sampling is not captured: %s", error)
                step.tails[key] = None
        tail: CapturedTail | None = step.tails[key]
        return tail

    def _tail_key(self, num_logits: int) -> Hashable:
        return self._capture_key, self.shape, num_logits, self.context.world_size > 1

    def _sampled_nodes(self, layout: StepLayout) -> tuple[list[int], list[bool], list[int]]:
        """What a tail is to know of the nodes that are sampled."""
        nodes = layout.sampled_nodes
        branches = self._branches(layout)
        noise_rows = self.sampler.noise_rows(layout.sampled_positions, branches)
        return nodes, [branch is not None for branch in branches], noise_rows

    def _sampled(self, logits: torch.Tensor, layout: StepLayout, text: Sequence[int], num_logits: int) -> Sampled:
        sampler = self.sampler
        nodes = layout.sampled_nodes
        branches = self._branches(layout)
        drafts = self._drafts(layout)
        best = best_logits(logits) if self.context.world_size > 1 else None
        scores = sampler.scores(logits, branches, text)
        sampled = sampler.sample(scores, layout.sampled_positions, branches, drafts)
        top_logits = pack_top_logits(scores, num_logits) if num_logits else sampled.new_zeros(len(nodes), 0)
        return Sampled(sampled, top_logits, best)  # the top 0 would take time, too

    def sampling_of(self, layout: StepLayout) -> tuple[list[int], list[list[int] | None]]:
        """Positions and branches of the sampled nodes, as `Sampler.sample` takes them."""
        return layout.sampled_positions, self._branches(layout)

    def _drafts(self, layout: StepLayout) -> list[list[int]]:
        """The draft tokens behind every sampled node, where the sampler needs them."""
        behind = layout.drafts() if self.sampler.uses_drafts else {}
        nodes = layout.sampled_nodes
        return [behind.get(node, []) for node in nodes] if behind else [[]] * len(nodes)

    def _branches(self, layout: StepLayout) -> list[list[int] | None]:
        """The tokens behind `c` that processors see of every sampled node; None where no walk can reach it."""
        if self.sampler.prefix_free:
            reachable = layout.nodes.reachable.tolist()
            return [[] if reachable[node] else None for node in layout.sampled_nodes]
        return [layout.branch_tokens(node) for node in layout.sampled_nodes]
