"""THE loop: lookahead decoding and lookahead parallelism, one path for 1..N ranks (DESIGN section 2).

A method is a window (or none) and a candidate source; prompt lookup is this loop without a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.config import Attention, KVSync, LookaheadConfig, PromptLookupConfig
from lp.decoding.base import Clock, Decoder, GenerationOutput, Request, StepStats
from lp.decoding.stopping import FINISH_REASON
from lp.distributed import ParallelContext
from lp.lookahead import exchange
from lp.lookahead.candidates import CandidateSource, TokenTree
from lp.lookahead.exchange import Stop
from lp.lookahead.layout import StepLayout, full_layout
from lp.lookahead.pool import NGramPool
from lp.lookahead.sharding import ShardPlan
from lp.lookahead.sources import PromptLookup
from lp.lookahead.verify import Outcome, walk
from lp.lookahead.window import LookaheadWindow
from lp.models.replicas import check_same, model_digests
from lp.models.runner import ModelRunner


class LookaheadDecoder(Decoder):
    """Exact greedy decoding in fewer steps (arXiv 2402.02057).

    Args:
        model: an HF causal LM, loaded and on its device.
        config: W, N, G and policies; None takes the defaults.
        context: the ranks to share each step with; None is this process alone.
        attention: "auto", "sdpa" or "eager"; an explicit one is set on the model.

    Raises:
        ValueError: a model whose architecture or attention takes no tree mask.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LookaheadConfig | None = None,
        context: ParallelContext | None = None,
        attention: str = "auto",
    ) -> None:
        super().__init__(model, context)
        self.config = config or LookaheadConfig()
        self.runner = ModelRunner(model, Attention(attention))
        exchange.check_vocabulary(model.get_input_embeddings().weight.shape[0])
        if self.context.world_size > 1:  # a single rank has nobody to differ from, and the checksum reads every weight
            check_same(self.context, model_digests(model))

    @property
    def reach(self) -> int:
        """Window and candidates, whichever goes further."""
        return self.config.window_size + self.config.ngram_size + self.config.row_budget

    @property
    def guess_noise(self) -> bool:
        """The window's policy."""
        return self.config.window_noise

    @property
    def settings(self) -> LookaheadConfig | PromptLookupConfig:
        """What ranks must agree on."""
        return self.config

    def source(self, prompt: Sequence[int]) -> CandidateSource:
        """What proposes candidates, made anew for every call."""
        config = self.config
        known = prompt if config.prompt_ngrams else ()
        return NGramPool(config.ngram_size, config.guess_set_size, config.depth, known, config.output_ngrams)

    def _decode(self, request: Request) -> GenerationOutput:
        return _Generation(self, request).run()


class PromptLookupDecoder(LookaheadDecoder):
    """Prompt lookup decoding: the same loop without a window, candidates copied from the text.

    Args:
        model, context, attention: as in LookaheadDecoder.
        config: how much to match and to copy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: PromptLookupConfig | None = None,
        context: ParallelContext | None = None,
        attention: str = "auto",
    ) -> None:
        self.lookup = config or PromptLookupConfig()
        shape = LookaheadConfig(
            window_size=0,
            ngram_size=2,
            guess_set_size=self.lookup.num_tokens,
            candidate_depth=self.lookup.num_tokens,  # all of them one path
            kv_sync=self.lookup.kv_sync,
        )
        super().__init__(model, shape, context, attention)

    @property
    def settings(self) -> LookaheadConfig | PromptLookupConfig:
        """How much to match and to copy."""
        return self.lookup

    def source(self, prompt: Sequence[int]) -> CandidateSource:
        """The prompt's runs of tokens."""
        return PromptLookup(self.lookup.max_matching_ngram, prompt)


class _Generation:
    """The state of one `generate` call; the same on every rank but for the cache and what it lacks."""

    def __init__(self, decoder: LookaheadDecoder, request: Request) -> None:
        self.config, self.context, self.runner = decoder.config, decoder.context, decoder.runner
        self.request, self.text = request, list(request.prompt)
        self.source = decoder.source(request.prompt)
        self.window = LookaheadWindow(self.config.window_size, self.config.ngram_size, request.prompt)
        step_rows = 1 + max(self.config.window_size, 1) * (self.config.ngram_size - 1) + self.config.row_budget
        self.cache = self.runner.new_cache(len(request.prompt) + request.max_new_tokens + step_rows)
        full = full_layout(self.config.window_size, self.config.ngram_size, self.config.row_budget, self.config.depth)
        self.row_size = exchange.row_size(ShardPlan.build(full, self.context.world_size))
        self.catch_up: list[int] = []  # accepted tokens whose KV this rank lacks
        self.digest, self.digested = (
            exchange.chain_digest(0, request.prompt),
            len(request.prompt),
        )  # tokens in the digest
        asked = (decoder.settings, request.max_new_tokens, request.limit, request.stopping, request.chooser)
        self.asked = exchange.text_digest(repr(asked))
        self.pending, self.keep = Stop.NONE, 0
        self.failure: BaseException | None = None
        self.stats: list[StepStats] = []

    @property
    def tokens(self) -> list[int]:
        """Generated so far."""
        return self.text[len(self.request.prompt) :]

    def run(self) -> GenerationOutput:
        clock = Clock()
        check_same(self.context, {"prompt": self.digest, "decoder config": self.asked})
        self.runner.prefill(self.request.prompt[:-1], self.cache, self.request.prefill_chunk)
        prefill_s, reason = clock.lap(), Stop.NONE
        while not reason:
            reason = self.step()
        if self.failure:
            raise self.failure
        tokens = self.tokens[: self.keep]
        bytes_ = self.cache.nbytes()
        return GenerationOutput(tokens, FINISH_REASON[reason], self.stats, prefill_s, clock.lap(), bytes_)

    def step(self) -> Stop:
        """One forward pass on every rank, one all-gather; the reason to stop after it, or NONE."""
        clock = Clock()
        candidates = self._propose()
        position = len(self.text) - 1
        layout = StepLayout(self.window, candidates, self.text[-1], position, self.request.limit_at(position))
        plan = ShardPlan.build(layout, self.context.world_size)
        host_s = clock.lap()
        said = self._forward(layout, plan)
        forward_s = clock.lap()
        row = exchange.pack(self._header(layout), said, plan, self.row_size)
        host_s += clock.lap()
        gathered = exchange.gather(row, self.row_size, self.context.all_gather, len(self.stats))
        exchange_s = clock.lap()
        read, told, keep = exchange.unpack(gathered, plan, layout)
        if told:
            return self._told(told, keep)
        outcome = walk(layout, read, 0 if self._warming else None)
        exchange_s += self._commit(layout, plan, outcome, clock)
        self._learn(layout, read, outcome)
        reason = self._deliver(outcome)
        slots, own = len(plan.slots[self.context.rank]), len(layout) - layout.n_window
        host_s += clock.lap()
        self.stats.append(StepStats(slots, own, outcome.accepted, forward_s, exchange_s, host_s))
        return reason

    @property
    def _warming(self) -> bool:
        return len(self.stats) < self.config.warmup_steps

    def _propose(self) -> TokenTree:
        return self.source.propose(self.text, 0 if self._warming else self.config.row_budget)

    def _forward(self, layout: StepLayout, plan: ShardPlan) -> torch.Tensor:
        """What this rank's owned reads say: int64 (owned reads,), on the device."""
        if self.request.crosses(layout.positions[0]):
            self.runner.cross(self.text, self.cache, self.request.prefill_chunk)
            self.catch_up = []
        slots, missing = plan.slots[self.context.rank], len(self.catch_up)
        place = {slot: missing + row for row, slot in enumerate(slots)}
        rows = missing + len(slots)
        visible = np.tri(rows, dtype=bool)
        visible[missing:, missing:] = layout.visible()[np.ix_(slots, slots)]
        start = layout.positions[0] - missing
        logits = self.runner.forward(
            self.catch_up + [layout.tokens[slot] for slot in slots],
            [*range(start, start + missing), *(layout.positions[slot] for slot in slots)],
            visible,
            self.cache,
            [place[slot] for slot in plan.reads[self.context.rank]],
        )
        reads = plan.reads[self.context.rank]
        positions = [layout.positions[slot] for slot in reads]
        branches = [layout.branch(slot) for slot in reads]
        drafts = [layout.drafts(slot) for slot in reads]
        return self.request.chooser.choose(logits, positions, branches, drafts, self.text)

    def _header(self, layout: StepLayout) -> tuple[int, int, int]:
        self.digest = exchange.chain_digest(self.digest, self.text[self.digested :], layout.tokens, layout.parents)
        self.digested = len(self.text)
        flags = self.pending | (Stop.INTERRUPTED if self.request.signals.requested else Stop.NONE)
        return self.digest, int(flags), self.keep

    def _told(self, told: Stop, keep: int) -> Stop:
        """Some rank wants to stop: the step's tokens are dropped, everything before it is kept."""
        verdict = told & ~(Stop.INTERRUPTED | Stop.FAILED)
        self.keep = keep if verdict else len(self.tokens)
        return verdict or Stop.INTERRUPTED

    def _commit(self, layout: StepLayout, plan: ShardPlan, outcome: Outcome, clock: Clock) -> float:
        """Keep the KV of the accepted path this rank has; get or owe the rest. Returns seconds of exchange."""
        slots, missing = plan.slots[self.context.rank], len(self.catch_up)
        place = {slot: missing + row for row, slot in enumerate(slots)}
        have = [slot for slot in outcome.path if slot in place]
        lacking = [rank for rank, theirs in enumerate(plan.slots) if outcome.path[-1] not in theirs]
        if self.config.kv_sync is KVSync.BROADCAST and lacking:
            return self._broadcast(plan, outcome, place, clock)
        self.cache.commit([*range(missing), *(place[slot] for slot in have)])
        self.catch_up = [layout.tokens[slot] for slot in outcome.path[len(have) :]]
        return 0.0

    def _broadcast(self, plan: ShardPlan, outcome: Outcome, place: dict[int, int], clock: Clock) -> float:
        """One rank has the whole path, since a rank computes a slot's ancestors too: it sends the accepted rows."""
        path = outcome.path[1:]
        source = next(rank for rank, theirs in enumerate(plan.slots) if path[-1] in theirs)
        flat = self.cache.rows([place.get(slot, 0) for slot in path])
        clock.lap()
        self.context.broadcast(flat, source)
        took = clock.lap()
        self.cache.commit([place[0]])
        self.cache.append(flat, len(path))
        return took

    def _learn(self, layout: StepLayout, read: dict[int, int], outcome: Outcome) -> None:
        new = [read[slot] for slot in layout.last_row()]
        ngrams = self.window.ngrams(new)
        self.text += outcome.tokens
        self.window.advance(self.text, len(outcome.tokens), new)
        guesses = [(layout.positions[slot], layout.tokens[slot], chosen) for slot, chosen in read.items()]
        if self._warming:  # the reference's window has no full column yet
            ngrams, guesses = [], []
        self.source.observe(self.text, len(outcome.tokens), ngrams, guesses)

    def _deliver(self, outcome: Outcome) -> Stop:
        """Stream the step's tokens and decide whether they end the text.

        What only this rank knows (a criterion, which may look at the clock; a failure) is told in the next header.
        """
        tokens, new = self.tokens, len(outcome.tokens)
        stopping, alone = self.request.stopping, self.context.world_size == 1
        if not alone and stopping.criteria and not self.context.is_main:
            self.keep = len(tokens)
            return Stop.NONE
        reason = Stop.NONE
        try:
            reason, self.keep = stopping.check(tokens, new)
            if self.request.on_tokens and tokens[len(tokens) - new : self.keep]:
                self.request.on_tokens(tokens[len(tokens) - new : self.keep], len(self.stats))
        except BaseException as error:
            if alone:
                raise
            self.failure = error
        if alone or not (stopping.criteria or (self.failure and not reason)):
            return reason  # every rank has the same: a failure in the last step must not wait for ranks that have ended
        self.pending = reason or (Stop.FAILED if self.failure else Stop.NONE)
        return Stop.NONE
