"""One `generate` call: the state that every rank holds alike, and THE step (DESIGN section 2)."""

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
from lp.models.kv_cache import CacheTooLarge
from lp.models.loader import vocabulary_size
from lp.models.runner import ModelRunner
from lp.parallel import message
from lp.parallel.agreement import RanksParted
from lp.parallel.context import ParallelContext
from lp.parallel.message import Stop
from lp.parallel.sharding import RankShare, ShardPlan
from lp.sampling import top_logits as wire
from lp.sampling.sampler import INVALID_TOKEN, check_sampled
from lp.sampling.top_logits import TopLogits

ALONE = np.ones((1, 1), dtype=bool)  # what a single row sees of its step
T = TypeVar("T")


class Generation:
    """Window, candidates and text of one call, the same on every rank; the cache, and what it lacks, is the rank's own.

    Args:
        config: shape and policies.
        context: the ranks.
        runner: runs the rows of a step.
        source: proposes candidates; made for this call.
        request: the checked call.
        budget: what a step takes.
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
        self.config, self.context, self.runner, self.source, self.request = config, context, runner, source, request
        self.budget = budget
        self.text = list(request.prompt)
        self.window = LookaheadWindow(budget.columns, config.ngram_size, request.prompt)
        largest = largest_layout(config)
        self.num_logits = min(source.num_logits, vocabulary_size(runner.model))
        self.shape = message.MessageShape.of(ShardPlan.build(largest, context.world_size), self.num_logits)
        self.cache = runner.new_cache(request.limit + 1 + max(len(largest), budget.max_padded_tokens))
        self.catch_up: list[int] = []  # accepted tokens whose KV this rank lacks
        self.catch_up_counts = [0] * context.world_size  # how many every rank lacks
        self.digest, self.digested = chain_digest(0, request.prompt), len(request.prompt)
        self.pending, self.keep = Stop.NONE, 0  # what only this rank knows yet, and the new tokens to return
        self.failure: BaseException | None = None
        self.stats: list[StepStats] = []

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
        clock = StepTimer()
        self.prefill()
        prefill_s, reason = clock.lap(), Stop.NONE
        while not reason:
            reason = self.plain_step() if self.budget.idle and not any(self.catch_up_counts) else self.step()
        if self.failure:
            raise self.failure
        tokens, decode_s = self.tokens[: self.keep], clock.lap()
        return GenerationOutput(tokens, FINISH_REASON[reason], self.stats, prefill_s, decode_s, self.cache.nbytes())

    def prefill(self) -> None:
        """Cache the prompt; what its rows say is rank 0's word, since ranks may round it differently."""
        prompt, sampler, rows = self.request.prompt, self.request.sampler, list[torch.Tensor]()
        read_too = self.config.prompt_logits and self.config.prompt_ngrams and self.budget.uses_prompt_logits
        wanted = self.num_logits if read_too else 0

        def read(logits: torch.Tensor) -> None:
            rows.append(wire.pack(sampler.scores(logits, [None] * len(logits), prompt), wanted))

        def fill() -> None:
            self.runner.prefill(prompt[:-1], self.cache, self.request.prefill_chunk, read if wanted else None)

        self._attempt(fill)
        if wanted and len(prompt) > 1:
            said = self._zeros(len(prompt) - 1, wanted) if self.failure else torch.cat(rows)
            self.source.begin(prompt, wire.unpack(self.context.broadcast(said, 0).cpu().numpy()))

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """What fails on this rank alone is told in the next header, or the others would wait for it until they give up.

        Raises:
            Exception: what the work raised, where there is no other rank.
        """
        try:
            if not self.failure:
                return work()
        except RanksParted:  # which the others know
            raise
        except Exception as error:
            self.failure, self.pending = self._explained(error), self.pending | Stop.FAILED
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

    def step(self) -> Stop:
        """One forward pass on every rank and one all-gather; the reason to stop after it, or NONE."""
        clock = StepTimer()
        candidates = self._propose()
        layout = self._layout(candidates)
        plan = ShardPlan.build(layout, self.context.world_size, self.catch_up_counts)
        rows = RankShare.build(layout, plan, self.context.rank, self.catch_up)
        clock.lap("host")
        said = self._attempt(lambda: self._forward(layout, plan, rows))
        chosen, likely = said or (self._zeros(len(rows.sample_at)), self._zeros(len(rows.sample_at), self.num_logits))
        header = self._header(clock, chosen, layout.tokens, layout.parents)
        row = message.pack(header, chosen, likely, plan, self.shape)
        clock.lap("host")
        gathered = message.gather(row, self.shape, self.context.all_gather, len(self.stats))
        clock.lap("exchange")
        read, top_logits, told, keep = message.unpack(gathered, plan, layout, self.shape)
        if told:
            return self._told(told, keep)
        outcome = walk(layout, read, 0 if self._warming else None)
        check_sampled(outcome.tokens[-1], len(self.stats), layout.positions[outcome.path[-1]])
        self.request.sampler.record(plan.owned[self.context.rank], outcome.sampled_at)
        self._commit(layout, plan, rows, outcome, clock)
        clock.lap("host")
        self.budget.record_step(outcome.tokens, len(layout), candidates)
        self._learn(layout, read, top_logits, outcome)
        clock.lap("learn")
        return self._deliver(outcome.tokens, clock, len(rows.tokens), layout)

    def plain_step(self) -> Stop:
        """The same of `c` alone: no guess is made and none is remembered, so that it takes what plain decoding does."""
        clock = StepTimer()
        position = len(self.text) - 1
        self._cross(position)

        def forward() -> torch.Tensor:
            logits = self.runner.forward(self.text[-1:], [position], ALONE, self.cache, [0])
            scores = self.request.sampler.scores(logits, [[]], self.text)
            return self.request.sampler.sample(scores, [position], [[]], [[]])

        said = self._attempt(forward)
        chosen = self._zeros(1) if said is None else said
        header = self._header(clock, chosen)
        ranks, step = self.context.world_size, len(self.stats)
        token, told, keep = message.agree(header, chosen, self.shape, self.context.all_gather, step, ranks)
        clock.lap("exchange")
        if told:
            return self._told(told, keep)
        check_sampled(token, step, position)
        self.request.sampler.record([0], [0])
        self.cache.length += 1
        self.text.append(token)
        self.budget.record_step([token], 1, DraftTree(0))
        return self._deliver([token], clock, 1)

    @property
    def _warming(self) -> bool:
        return len(self.stats) < self.config.warmup_steps

    def _propose(self) -> DraftTree:
        rows = 0 if self._warming or self.budget.idle else self.budget.draft_tokens
        return self.source.propose(self.text, rows, *self.window.free_drafts(), self.budget.price)

    def _cross(self, position: int) -> None:
        if self.request.crosses(position):
            self._attempt(lambda: self.runner.cross(self.text, self.cache, self.request.prefill_chunk))
            self.catch_up, self.catch_up_counts = [], [0] * self.context.world_size

    def _layout(self, candidates: DraftTree) -> StepLayout:
        position = len(self.text) - 1
        self._cross(position)
        return StepLayout(self.window, candidates, self.text[-1], position, self.request.limit_at(position))

    def _forward(self, layout: StepLayout, plan: ShardPlan, rows: RankShare) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank's owned reads choose, int64 (owned reads,), and their likeliest tokens, on the device."""
        run = rows.padded(self.budget.padded_size(len(rows.tokens)))
        logits = self.runner.forward(run.tokens, run.positions, run.visible, self.cache, run.sample_at)
        sampler, nodes = self.request.sampler, plan.owned[self.context.rank]
        positions = [layout.positions[node] for node in nodes]
        branches = [layout.branch(node, sampler.prefix_free) for node in nodes]
        drafts = [layout.drafts(node) for node in nodes] if sampler.uses_drafts else []
        scores = sampler.scores(logits, branches, self.text)
        return sampler.sample(scores, positions, branches, drafts), wire.pack(scores, self.num_logits)

    def _header(self, clock: StepTimer, chosen: torch.Tensor, *parts: Sequence[int]) -> tuple[int, Stop, int]:
        """What the other ranks are told besides what was chosen, made while a GPU is still at it."""
        clock.lap("forward")
        if self.context.world_size > 1:  # a single rank has nobody to differ from
            self.digest = chain_digest(self.digest, self.text[self.digested :], *parts)
            self.digested = len(self.text)
        flags = self.pending | Stop.INTERRUPTED if self.request.signals.requested else self.pending
        clock.lap("host")
        if chosen.is_cuda:  # or the exchange, which waits for it, would seem to take the model's time
            torch.cuda.synchronize(chosen.device)
            clock.lap("forward")
        return self.digest, flags, self.keep

    def _told(self, told: Stop, keep: int) -> Stop:
        """Some rank wants to stop: the step's tokens are dropped, everything before it is kept."""
        verdict = told & ~(Stop.INTERRUPTED | Stop.FAILED)
        self.keep = keep if verdict else len(self.tokens)
        return verdict or Stop.INTERRUPTED

    def _commit(self, layout: StepLayout, plan: ShardPlan, rows: RankShare, outcome: Outcome, clock: StepTimer) -> None:
        """Keep the KV of the accepted path that this rank has; get or owe the rest."""
        lacking = any(outcome.path[-1] not in nodes for nodes in plan.nodes)
        if self.config.kv_sync is KVSync.BROADCAST and lacking:
            self._broadcast(plan, rows, outcome, clock)
            return
        have = [rows.index_of[node] for node in outcome.path if node in rows.index_of]
        self.cache.commit([*range(rows.catch_up), *have])
        self.catch_up = [layout.tokens[node] for node in outcome.path[len(have) :]]
        self.catch_up_counts = [sum(node not in nodes for node in outcome.path) for nodes in map(set, plan.nodes)]

    def _broadcast(self, plan: ShardPlan, rows: RankShare, outcome: Outcome, clock: StepTimer) -> None:
        """Some rank has the whole path, since a rank computes a node's ancestors too: it sends the accepted rows."""
        path = outcome.path[1:]
        source = next(rank for rank, nodes in enumerate(plan.nodes) if path[-1] in nodes)
        flat = self.cache.rows([rows.index_of.get(node, 0) for node in path])
        clock.lap("host")
        self.context.broadcast(flat, source)
        clock.lap("exchange")
        self.cache.commit([*range(rows.catch_up), rows.index_of[0]])
        self.cache.append(flat, len(path))

    def _learn(self, layout: StepLayout, read: dict[int, int], top_logits: TopLogits, outcome: Outcome) -> None:
        new = [read[node] % INVALID_TOKEN for node in layout.last_level()]  # a row that only guesses may say nothing
        ngrams, nodes = self.window.ngrams(new), layout.sampled_nodes
        if self._warming:  # the reference's window has no full column yet
            ngrams, nodes, top_logits = [], [], TopLogits.empty()
        chosen = [read[node] % INVALID_TOKEN for node in nodes]
        seen = StepSamples(layout.tokens, layout.positions, layout.parents, nodes, chosen, top_logits, ngrams)
        self.text += outcome.tokens
        self.window.window_size = self.budget.columns
        self.window.advance(self.text, len(outcome.tokens), new)
        self.source.observe(self.text, len(outcome.tokens), seen)

    def _deliver(self, new: Sequence[int], clock: StepTimer, rows: int, layout: StepLayout | None = None) -> Stop:
        """Stream the step's tokens, decide whether they end the text, and note what the step took."""
        reason = self._stream(len(new))
        clock.lap("host")
        candidates, columns = (len(layout) - layout.num_window, layout.columns) if layout else (0, 0)
        self.stats.append(StepStats.of(clock, rows, candidates, len(new) - 1, columns, layout is None))
        return reason

    def _stream(self, new: int) -> Stop:
        """Stream the newest tokens and decide whether they end the text.

        What only this rank knows (a criterion, which may look at the clock; a failure) is told in the next header.
        """
        tokens, reason = self.tokens, Stop.NONE
        stopping, alone = self.request.stopping, self.context.world_size == 1
        if not alone and stopping.criteria and not self.context.is_main:
            self.keep = len(tokens)
            return reason
        try:
            reason, self.keep = stopping.check(tokens, new)
            if self.request.on_tokens and tokens[len(tokens) - new : self.keep]:
                self.request.on_tokens(tokens[len(tokens) - new : self.keep], len(self.stats))
        except BaseException as error:
            if alone or isinstance(error, RanksParted):
                raise
            self.failure = error
        if alone or not (stopping.criteria or (self.failure and not reason)):
            return reason  # every rank has the same: a failure in the last step must not wait for ranks that have ended
        self.pending = reason or (Stop.FAILED if self.failure else Stop.NONE)
        return Stop.NONE
