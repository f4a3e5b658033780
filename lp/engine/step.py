"""One `generate` call: the state that every rank holds alike, and the decode step.

A step is one tree of nodes with `c`, the last generated token, at its root. Its KV is not in the cache yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from lp.budget.policy import Budget
from lp.config import KVSync, LookaheadConfig
from lp.digest import chain_digest
from lp.draft.layout import StepLayout, largest_layout
from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree
from lp.draft.verify import Outcome, walk
from lp.draft.window import LookaheadWindow
from lp.engine.memory import too_large
from lp.engine.output import GenerationOutput, StepStats, StepTimer
from lp.engine.request import Request
from lp.engine.stopping import FINISH_REASON
from lp.errors import RanksParted
from lp.models.kv_cache import CacheTooLarge
from lp.models.loader import vocabulary_size
from lp.models.runner import ModelRunner
from lp.parallel.context import ParallelContext
from lp.parallel.message import Gathered, Header, MessageShape, Stop, gather, gather_plain, pack, unpack
from lp.parallel.sharding import RankShare, ShardPlan
from lp.sampling.sampler import INVALID_TOKEN, check_sampled
from lp.sampling.top_logits import TopLogits, pack_top_logits, unpack_top_logits

SEES_ITSELF = np.ones((1, 1), dtype=bool)  # what the only token of a plain step sees of its step

T = TypeVar("T")


class Generation:
    """The loop of one call, on one rank.

    Text, window and draft source are the same on every rank, and changed only from gathered data. The KV cache, and the
    accepted tokens that it lacks, are the rank's own.

    Args:
        config: shape and policies.
        context: the ranks.
        runner: runs the forward pass of a step.
        source: proposes draft trees; made for this call.
        request: the checked call.
        budget: decides how many columns and draft tokens a step has.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        context: ParallelContext,
        runner: ModelRunner,
        source: DraftSource,
        request: Request,
        budget: Budget,
    ) -> None:
        self.config = config
        self.context = context
        self.runner = runner
        self.source = source
        self.request = request
        self.budget = budget
        self.text = list(request.prompt)
        self.window = LookaheadWindow(budget.columns, config.ngram_size, request.prompt)
        self.num_logits = min(source.num_logits, vocabulary_size(runner.model))
        largest = largest_layout(config)
        self.message_shape = MessageShape.of(ShardPlan.build(largest, context.world_size), self.num_logits)
        runner.follow()
        self.cache = runner.new_cache(request.limit + 1 + max(len(largest), budget.max_padded_tokens))
        self.catch_up: list[int] = []  # accepted tokens whose KV this rank lacks
        self.catch_up_counts = [0] * context.world_size  # how many every rank lacks
        self.digest = chain_digest(0, request.prompt)
        self.num_digested = len(request.prompt)  # tokens of the text that are in the digest
        self.pending_stop = Stop.NONE  # what only this rank knows, until its next message
        self.num_kept = 0  # new tokens to return
        self.failure: BaseException | None = None
        self.stats: list[StepStats] = []
        self.timer = StepTimer()

    @property
    def tokens(self) -> list[int]:
        """Generated so far."""
        return self.text[len(self.request.prompt) :]

    def run(self) -> GenerationOutput:
        """Prefill, then step until something ends the text.

        Raises:
            RuntimeError: the ranks' states differ.
            BaseException: what a callback raised on this rank, once all ranks have stopped.
        """
        timer = StepTimer()
        self.prefill()
        prefill_s = timer.restart()
        reason = Stop.NONE
        while not reason:
            plain = self.budget.idle and not any(self.catch_up_counts)
            reason = self.plain_step() if plain else self.step()
        if self.failure:
            raise self.failure
        tokens = self.tokens[: self.num_kept]
        return GenerationOutput(
            tokens, FINISH_REASON[reason], self.stats, prefill_s, timer.restart(), self.cache.nbytes()
        )

    def prefill(self) -> None:
        """Cache the prompt. Its top-k logits are rank 0's on every rank, since ranks may round them differently."""
        prompt = self.request.prompt
        uses_logits = self.config.prompt_logits and self.config.prompt_ngrams and self.budget.uses_prompt_logits
        num_logits = self.num_logits if uses_logits else 0
        packed: list[torch.Tensor] = []

        def collect(logits: torch.Tensor) -> None:
            scores = self.request.sampler.scores(logits, [None] * len(logits), prompt)
            packed.append(pack_top_logits(scores, num_logits))

        def fill() -> None:
            chunk = self.request.prefill_chunk
            self.runner.prefill(prompt[:-1], self.cache, chunk, collect if num_logits else None)

        self._attempt(fill)
        if num_logits and len(prompt) > 1:
            mine = self._zeros(len(prompt) - 1, num_logits) if self.failure else torch.cat(packed)
            self.source.begin(prompt, unpack_top_logits(self.context.broadcast(mine, 0).cpu().numpy()))

    def step(self) -> Stop:
        """One forward pass on every rank and one all-gather; the reason to stop after it, or NONE."""
        self.timer.restart()
        tree = self._propose()
        self._cross_rope_boundary()
        layout = self._layout(tree)
        plan = ShardPlan.build(layout, self.context.world_size, self.catch_up_counts)
        share = RankShare.build(layout, plan, self.context.rank, self.catch_up)
        sampled, top_logits = self._forward(layout, plan, share)
        gathered = self._exchange(layout, plan, sampled, top_logits)
        if gathered.stop:
            return self._stop(gathered.stop, gathered.length)
        outcome = self._verify(layout, plan, gathered.sampled)
        self._commit(layout, plan, share, outcome)
        self.budget.record_step(outcome.tokens, len(layout), tree)
        self._learn(layout, gathered, outcome)
        return self._deliver(outcome.tokens, len(share.tokens), layout)

    def plain_step(self) -> Stop:
        """The same of `c` alone, on every rank: nothing is drafted or learned, so it takes what plain decoding does."""
        self.timer.restart()
        self._cross_rope_boundary()
        position = len(self.text) - 1
        sampled = self._forward_plain(position)
        token, stop, length = self._exchange_plain(sampled)
        if stop:
            return self._stop(stop, length)
        check_sampled(token, len(self.stats), position)
        self.request.sampler.record([0], [0])
        self.cache.length += 1
        self.text.append(token)
        self.budget.record_step([token], 1, DraftTree())
        return self._deliver([token], 1)

    @property
    def _warming_up(self) -> bool:
        return len(self.stats) < self.config.warmup_steps

    def _propose(self) -> DraftTree:
        budget = 0 if self._warming_up or self.budget.idle else self.budget.draft_tokens
        return self.source.propose(self.text, budget, self.window.drafts(), self.budget.price)

    def _cross_rope_boundary(self) -> None:
        """Where the model's rotary frequencies change at `c`, compute the cache as plain decoding does there."""
        if self.request.crosses(len(self.text) - 1):
            self._attempt(lambda: self.runner.cross(self.text, self.cache, self.request.prefill_chunk))
            self.catch_up = []
            self.catch_up_counts = [0] * self.context.world_size

    def _layout(self, tree: DraftTree) -> StepLayout:
        position = len(self.text) - 1
        return StepLayout(self.window, tree, self.text[-1], position, self.request.limit_at(position))

    def _forward(self, layout: StepLayout, plan: ShardPlan, share: RankShare) -> tuple[torch.Tensor, torch.Tensor]:
        """Run this rank's share: tokens, int64 (n,), and packed top-k logits, int64 (n, K), of its n owned nodes.

        Zeros if it fails: what failed is in the header.
        """
        nodes = plan.owned[self.context.rank]
        sampler = self.request.sampler

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            padded = share.padded(self.budget.padded_size(len(share.tokens)))
            logits = self.runner.forward(padded.tokens, padded.positions, padded.visible, self.cache, padded.sample_at)
            positions = [layout.positions[node] for node in nodes]
            branches: list[list[int] | None]
            if sampler.prefix_free:
                branches = [[] if layout.reachable(node) else None for node in nodes]
            else:
                branches = [layout.branch_tokens(node) for node in nodes]
            drafts = [layout.drafts(node) for node in nodes] if sampler.uses_drafts else []
            scores = sampler.scores(logits, branches, self.text)
            return sampler.sample(scores, positions, branches, drafts), pack_top_logits(scores, self.num_logits)

        with self.timer.forward:
            sampled = self._attempt(forward)
        return sampled or (self._zeros(len(nodes)), self._zeros(len(nodes), self.num_logits))

    def _forward_plain(self, position: int) -> torch.Tensor:
        """The token sampled at `c`, int64 (1,); zero if it fails."""
        sampler = self.request.sampler

        def forward() -> torch.Tensor:
            logits = self.runner.forward(self.text[-1:], [position], SEES_ITSELF, self.cache, [0])
            return sampler.sample(sampler.scores(logits, [[]], self.text), [position], [[]], [[]])

        with self.timer.forward:
            sampled = self._attempt(forward)
        return self._zeros(1) if sampled is None else sampled

    def _exchange(
        self, layout: StepLayout, plan: ShardPlan, sampled: torch.Tensor, top_logits: torch.Tensor
    ) -> Gathered:
        """What all ranks sampled, by one all-gather."""
        header = self._header(layout.tokens, layout.parents)
        self._wait_for_device(sampled)
        message = pack(header, sampled, top_logits, plan, self.message_shape)
        with self.timer.exchange:
            messages = gather(message, self.message_shape, self.context.all_gather, len(self.stats))
        return unpack(messages, plan, layout, self.message_shape)

    def _exchange_plain(self, sampled: torch.Tensor) -> tuple[int, Stop, int]:
        """Rank 0's token, why any rank wants to stop, and the tokens to return then."""
        header = self._header()
        self._wait_for_device(sampled)
        ranks, step = self.context.world_size, len(self.stats)
        with self.timer.exchange:
            return gather_plain(header, sampled, self.message_shape, self.context.all_gather, step, ranks)

    def _header(self, *step: Sequence[int]) -> Header:
        """Made while a GPU still computes the step."""
        if self.context.world_size > 1:  # a single rank has none to differ from
            self.digest = chain_digest(self.digest, self.text[self.num_digested :], *step)
            self.num_digested = len(self.text)
        stop = self.pending_stop
        if self.request.signals.requested:
            stop |= Stop.INTERRUPTED
        return Header(self.digest, stop, self.num_kept)

    def _wait_for_device(self, sampled: torch.Tensor) -> None:
        """Or the exchange, which waits for it, would seem to take the model's time."""
        if sampled.is_cuda:
            with self.timer.forward:
                torch.cuda.synchronize(sampled.device)

    def _stop(self, stop: Stop, length: int) -> Stop:
        """Some rank wants to stop: this step's tokens are dropped, those before it are returned."""
        end_of_text = stop & ~(Stop.INTERRUPTED | Stop.FAILED)
        self.num_kept = length if end_of_text else len(self.tokens)
        return end_of_text or Stop.INTERRUPTED

    def _verify(self, layout: StepLayout, plan: ShardPlan, sampled: dict[int, int]) -> Outcome:
        """Walk the tree along what was sampled."""
        outcome = walk(layout, sampled, 0 if self._warming_up else None)
        check_sampled(outcome.tokens[-1], len(self.stats), layout.positions[outcome.path[-1]])
        self.request.sampler.record(plan.owned[self.context.rank], outcome.sampled_at)
        return outcome

    def _commit(self, layout: StepLayout, plan: ShardPlan, share: RankShare, outcome: Outcome) -> None:
        """Add the accepted tokens to the text, and their KV, as far as this rank has it, to the cache."""
        self.text += outcome.tokens
        incomplete = any(outcome.path[-1] not in nodes for nodes in plan.nodes)
        if self.config.kv_sync is KVSync.BROADCAST and incomplete:
            self._broadcast_kv(plan, share, outcome)
            return
        computed = [share.index_of[node] for node in outcome.path if node in share.index_of]
        self.cache.commit([*range(share.catch_up), *computed])
        self.catch_up = [layout.tokens[node] for node in outcome.path[len(computed) :]]
        self.catch_up_counts = [sum(node not in nodes for node in outcome.path) for nodes in map(set, plan.nodes)]

    def _broadcast_kv(self, plan: ShardPlan, share: RankShare, outcome: Outcome) -> None:
        """The rank that computed the end of the path computed all of it: it sends the KV to the others."""
        path = outcome.path[1:]
        source = next(rank for rank, nodes in enumerate(plan.nodes) if path[-1] in nodes)
        flat = self.cache.pack([share.index_of.get(node, 0) for node in path])
        with self.timer.exchange:
            self.context.broadcast(flat, source)
        self.cache.commit([*range(share.catch_up), share.index_of[0]])
        self.cache.append(flat, len(path))

    def _learn(self, layout: StepLayout, gathered: Gathered, outcome: Outcome) -> None:
        """Advance the window and show the draft source what the step sampled."""
        # A node that no walk can reach may have sampled nothing: its scores were not finite.
        last_level = [gathered.sampled[node] % INVALID_TOKEN for node in layout.last_level()]
        ngrams = self.window.ngrams(last_level)
        nodes, top_logits = layout.sampled_nodes, gathered.top_logits
        if self._warming_up:  # the reference code's window has no full column yet
            ngrams, nodes, top_logits = [], [], TopLogits.empty()
        sampled = [gathered.sampled[node] % INVALID_TOKEN for node in nodes]
        samples = StepSamples(layout.tokens, layout.positions, layout.parents, nodes, sampled, top_logits, ngrams)
        self.window.window_size = self.budget.columns
        self.window.advance(self.text, len(outcome.tokens), last_level)
        self.source.observe(self.text, len(outcome.tokens), samples)

    def _deliver(self, new_tokens: Sequence[int], num_tokens: int, layout: StepLayout | None = None) -> Stop:
        """Stream the step's tokens, decide whether they end the text, and note what the step took.

        Args:
            new_tokens: that the step added.
            num_tokens: that this rank computed.
            layout: of the step; None for a plain one.
        """
        reason = self._stream(len(new_tokens))
        num_draft = len(layout) - layout.num_window if layout else 0
        columns = layout.columns if layout else 0
        seconds = self.timer.seconds()
        self.stats.append(StepStats(num_tokens, num_draft, len(new_tokens) - 1, *seconds, columns, layout is None))
        return reason

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """Do what may fail on this rank alone: the next header says so, or the others would wait for their time-out.

        Returns:
            What the work returns; None where it failed, now or before.

        Raises:
            Exception: what the work raised, where there is no other rank.
        """
        try:
            if not self.failure:
                return work()
        except RanksParted:  # the others have it too
            raise
        except Exception as error:
            self.failure = self._explained(error)
            self.pending_stop |= Stop.FAILED
            if self.context.world_size == 1:
                raise self.failure from error
        return None

    def _explained(self, error: Exception) -> Exception:
        if not isinstance(error, CacheTooLarge):
            return error
        prompt, limit = len(self.request.prompt), self.request.limit
        return too_large(error, self.config, prompt, limit + 1 - prompt, self.runner.device)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=self.runner.device)

    def _stream(self, num_new: int) -> Stop:
        """Stream the newest tokens and decide whether they end the text.

        What only this rank knows (a criterion, which may look at the clock; a failure) goes into the next header.
        """
        tokens = self.tokens
        stopping = self.request.stopping
        alone = self.context.world_size == 1
        if not alone and stopping.criteria and not self.context.is_main:
            self.num_kept = len(tokens)
            return Stop.NONE
        reason = Stop.NONE
        try:
            reason, self.num_kept = stopping.check(tokens, num_new)
            streamed = tokens[len(tokens) - num_new : self.num_kept]
            if self.request.on_tokens and streamed:
                self.request.on_tokens(streamed, len(self.stats))
        except BaseException as error:
            if alone or isinstance(error, RanksParted):
                raise
            self.failure = error
        if alone or not (stopping.criteria or (self.failure and not reason)):
            return reason  # every rank has the same: a failure in the last step must not wait for ranks that have ended
        self.pending_stop = reason or (Stop.FAILED if self.failure else Stop.NONE)
        return Stop.NONE
