"""The step curve of a decoder: real steps of every size, through its loop, its pool and its ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lp.budget.policy import FixedBudget
from lp.budget.step_times import SIZES, StepTimes, machine, measure, remembered
from lp.config import PoolScope
from lp.draft.pool.ngram_pool import NGramPool, fresh_tables
from lp.draft.tree import DraftTree
from lp.engine.decoder import Decoder
from lp.engine.memory import largest_step
from lp.engine.output import GenerationOutput
from lp.engine.request import Request
from lp.engine.signals import interruption
from lp.engine.step import Generation
from lp.models.loader import context_limit, vocabulary_size
from lp.parallel.message import Stop
from lp.parallel.rendezvous import env_int

if TYPE_CHECKING:
    from lp.engine.lookahead import LookaheadDecoder

PREFIX, NEW = 256, 256  # tokens before the first step, and behind it


def measured_step_times(decoder: LookaheadDecoder) -> StepTimes:
    """From the cache folder, or measured now, in a few seconds."""
    model, runner, config = decoder.model, decoder.runner, decoder.config
    shape = repr(replace(config, pool_scope=PoolScope.REQUEST, pool_file=None))
    how = runner.captured and runner.captured.how
    where = (decoder.context.world_size, decoder.context.backend, env_int("LOCAL_WORLD_SIZE", 1))
    what = (model.config.to_json_string(), str(model.dtype), *where, runner.attention, how, shape)
    kept = vars(model).setdefault("_lp_curves", {})
    return remembered((*what, *machine(runner.device)), lambda: _Stopwatch(decoder).curve(), decoder.context, kept)


class _Stopwatch(Decoder):
    """Steps of sizes asked for, of a text whose candidates are all wrong, so that a step is a token."""

    def __init__(self, decoder: LookaheadDecoder) -> None:
        super().__init__(decoder.model, decoder.context)
        self.runner = decoder.runner
        self.most = min(largest_step(decoder.config), SIZES[-1])
        self.config = replace(
            decoder.config,
            adaptive=False,
            window_size=0,
            ngram_size=2,
            guess_set_size=self.most - 1,
            warmup_steps=0,
        )
        self.measured: StepTimes | None = None

    def curve(self) -> StepTimes:
        """Measure it."""
        room = min(context_limit(self.model) or PREFIX + NEW, PREFIX + NEW)
        rng, vocabulary = random.Random(0), vocabulary_size(self.model)
        self.generate([rng.randrange(vocabulary) for _ in range(max(room // 2, 1))], room, eos_token_id=())
        assert self.measured
        return self.measured

    def _decode(self, request: Request) -> GenerationOutput:
        budget = FixedBudget(self.config)
        run, reason = self._begun(request, budget), Stop.NONE

        def step(rows: int) -> float:
            nonlocal run, reason
            if reason or len(run.tokens) > (request.limit - len(request.prompt)) // 2:
                run = self._begun(request, budget)  # with room for deep trees
            budget.rows = max(rows - 1, 0)
            reason = run.step() if rows else run.plain_step()
            if reason is Stop.INTERRUPTED:
                raise run.failure or interruption(request.signals.received)  # 0: another rank's
            return run.stats[-1].seconds

        self.measured = measure(step, self.most, self.context)
        return GenerationOutput([], "length", [])

    def _begun(self, request: Request, budget: FixedBudget) -> Generation:
        source = _Wrong(self.config, request.prompt, None, fresh_tables(self.config, vocabulary_size(self.model)))
        generation = Generation(self.config, self.context, self.runner, source, request, budget)
        generation.prefill()
        return generation


class _Wrong(NGramPool):
    """The pool, but what it proposes is all wrong, and as much as was asked for."""

    def propose(self, text: Sequence[int], budget: int, *window: Any) -> DraftTree:
        """The pool's tree with every token exchanged for another, filled up at the root."""
        known, tree = super().propose(text, budget, *window), DraftTree(budget, merge=False)
        tree.tokens = [token - 1 if token else 1 for token in known.tokens] + [0] * (budget - len(known))
        tree.parents = known.parents + [-1] * (budget - len(known))
        return tree
