"""Times the steps of a decoder: real steps of every size, through its loop, its pool and its ranks."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lp.budget.explain import describe_origin
from lp.budget.measure import SIZES, Measurement, measure_step_times
from lp.budget.observed_times import corrected
from lp.budget.policy import FixedBudget
from lp.budget.step_times import StepTimes
from lp.budget.step_times_cache import StepTimesFile, load_or_measure, machine_key
from lp.checks import env_int
from lp.config import LookaheadConfig, PoolScope
from lp.draft.pool.factory import fresh_tables
from lp.draft.pool.ngram_pool import NGramPool
from lp.draft.share import Share, step_tokens
from lp.draft.source import ShareInput
from lp.draft.tree import DraftTree
from lp.engine.decode_loop import Generation, cache_slots
from lp.engine.decoder import Decoder
from lp.engine.interrupts import interruption
from lp.engine.output import GenerationOutput, StepStats
from lp.engine.request import Request
from lp.models.kv_cache import StaticKVCache
from lp.models.loader import context_limit, vocabulary_size
from lp.models.runner import ModelRunner
from lp.parallel.agreement import exchange
from lp.parallel.context import ParallelContext
from lp.parallel.message import Stop

# Tokens of the text in which steps are timed: half of them are its prompt, unless the model's context is shorter.
TEXT_TOKENS = 512
# Longest draft path of a timed step, so that it ends before the text does. All of its tokens are wrong.
TIMED_DEPTH = TEXT_TOKENS // 8


class GivenStepTimes:
    """Step times that stay as the user gave them.

    Attributes:
        times: the same on every rank.
        origin: where they are from, for the user.
    """

    origin = ""

    def __init__(self, times: StepTimes) -> None:
        self.times = times

    def observe(self, steps: Sequence[StepStats]) -> None:
        """Take in the steps of a text that shared none of them."""

    def update(self) -> None:
        """Take what rank 0 learned; called by every rank between texts."""


class KnownStepTimes(GivenStepTimes):
    """The step times of a decoder: from the user's cache folder, or measured now, in a few seconds.

    Texts correct them.

    Args:
        runner, config, context: the decoder's.
        again: measure them, whatever is stored.
    """

    def __init__(
        self, runner: ModelRunner, config: LookaheadConfig, context: ParallelContext, again: bool = False
    ) -> None:
        self._context = context
        self._file = step_times_file(runner, config, context)
        measured = load_or_measure(self._file, StepTimingDecoder(runner, config, context).measure, context, again)
        super().__init__(measured.times)
        self.origin = describe_origin(self._file.path, measured.doubtful)
        self._observed = self.times  # by this rank's clock

    def observe(self, steps: Sequence[StepStats]) -> None:
        self._observed = corrected(self.times, steps)
        if self._context.is_main and self._observed != self.times:
            self._file.write(self._observed)
            self.origin = describe_origin(self._file.path)

    def update(self) -> None:
        mine = struct.pack(f"{1 + len(self.times.seconds)}d", self._observed.plain_s, *self._observed.seconds)
        words = exchange(self._context, "correcting step times", np.frombuffer(mine, np.int64).tolist())
        plain_s, *seconds = words[0].numpy().view(np.float64).tolist()
        self.times = self._observed = StepTimes(self.times.num_tokens, tuple(seconds), plain_s)


def step_times_file(runner: ModelRunner, config: LookaheadConfig, context: ParallelContext) -> StepTimesFile:
    """Where the step times of a decoder with these parts are stored."""
    model = runner.model
    config_without_pool = replace(config, pool_scope=PoolScope.REQUEST, pool_file=None, pool_model_ngrams="off")
    key_parts = (
        model.config.to_json_string(),
        str(model.dtype),
        context.lp.world_size,
        *([context.replica.size] if context.replica.size > 1 else []),
        context.backend,
        env_int("LOCAL_WORLD_SIZE", 1),
        runner.attention,
        runner.fused,
        runner.captured and not runner.captured.reserved and runner.captured.mode,
        repr(config_without_pool),
        *machine_key(runner.device),
    )
    about = {
        "model": Path(model.config.name_or_path or type(model).__name__).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(runner.device),
        "threads": torch.get_num_threads(),
        "ranks": context.lp.world_size,
        "attention": runner.attention,
    }
    return StepTimesFile(about, key_parts, vars(runner.original).setdefault("_lp_step_times", {}))


class StepTimingDecoder(Decoder):
    """Decodes a drawn text with steps of given sizes, whose draft tokens are all wrong: each step adds one token.

    Args:
        runner: the decoder's, whose steps are timed.
        config: the decoder's.
        context: the ranks.
    """

    def __init__(self, runner: ModelRunner, config: LookaheadConfig, context: ParallelContext) -> None:
        super().__init__(runner.model, context)
        self.runner = runner
        self.max_tokens = min(step_tokens(config), SIZES[-1])
        self.config = replace(
            config,
            adaptive=False,
            window_size=0,
            ngram_size=2,
            guess_set_size=self.max_tokens - 1,
            draft_depth=min(config.depth, TIMED_DEPTH),
            warmup_steps=0,
        )
        self._measured: Measurement | None = None

    def measure(self) -> Measurement:
        """Measure the step times, on all ranks."""
        text_tokens = min(context_limit(self.model) or TEXT_TOKENS, TEXT_TOKENS)
        rng = random.Random(0)
        vocabulary = vocabulary_size(self.model)
        prompt = [rng.randrange(vocabulary) for _ in range(max(text_tokens // 2, 1))]
        self.generate(prompt, text_tokens, eos_token_id=())
        assert self._measured
        return self._measured

    def _decode(self, request: Request) -> GenerationOutput:
        self.runner.follow()
        with self.runner.borrowed_cache(cache_slots(request, FixedBudget(self.config))) as cache:
            self._measured = self._measure(request, cache)
        return GenerationOutput([], "length", [])

    def _measure(self, request: Request, cache: StaticKVCache) -> Measurement:
        budget = FixedBudget(self.config)
        generation = self._prefilled(request, budget, cache)
        reason = Stop.NONE

        def step(num_tokens: int) -> float:
            nonlocal generation, reason
            no_room = len(generation.tokens) > (request.limit - len(request.prompt)) // 2  # for deep trees
            lacks_kv = generation.catch_up_counts.any()  # of a draft token that was right, for all that
            if reason or no_room or lacks_kv:
                generation = self._prefilled(request, budget, cache)
            budget.step_tokens = max(num_tokens, 1)
            budget.idle = not num_tokens
            reason = generation.step()
            if reason is Stop.INTERRUPTED:
                # A signal of 0: it was another rank's.
                raise generation.failure or interruption(request.signals.received)
            return generation.stats[-1].seconds

        return measure_step_times(step, self.max_tokens, self.context)

    def _prefilled(self, request: Request, budget: FixedBudget, cache: StaticKVCache) -> Generation:
        budget.step_tokens = self.max_tokens  # its message and its cache are made for the largest step
        tables = fresh_tables(self.config, vocabulary_size(self.model))
        source = RejectedDrafts(self.config, request.prompt, None, tables)
        cache.clear()
        late = self.runner.beside_host
        generation = Generation(self.config, self.context.lp, self.runner, source, budget, request, cache, late)
        generation.capture_steps()
        generation.prefill()
        return generation


class RejectedDrafts(NGramPool):
    """The n-gram pool, with every draft token it proposes replaced by a wrong one, and always as many as allowed."""

    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """The pool's share with other tokens, filled up with children of the root."""
        share = super().propose_share(text, step)
        missing = step.rooms[step.rank] - len(share.draft)
        tokens = [token - 1 if token else 1 for token in share.draft.tokens]
        tree = DraftTree([*tokens, *[0] * missing], [*share.draft.parents, *[-1] * missing], merge=False)
        return Share(tree, share.common)
