"""Step times: how long a decode step takes, by its number of tokens; adaptive budgets choose that number by them.

A process has one table for each model, which the steps of all requests correct; a file keeps it for later processes.
"""

from __future__ import annotations

import json
import struct
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from lp.budget.explain import describe_origin
from lp.budget.observed_times import Estimate, TimedStep
from lp.budget.prior import SIZES, prior_times
from lp.budget.step_times import StepTimes
from lp.budget.step_times_cache import StepTimesFile, machine_key, read_estimate
from lp.checks import env_int
from lp.config import KVDtype, LookaheadConfig, PoolScope
from lp.draft.share import step_tokens
from lp.models.layer_timing import TIMED_SIZES, time_passes
from lp.models.model_lock import lock_of
from lp.models.runner import ModelRunner
from lp.parallel.agreement import exchange
from lp.parallel.context import ParallelContext

# The estimate is corrected by several steps at a time: by half as many as it knows already, within these bounds.
FEWEST_STEPS, MOST_STEPS = 4, 32
# The file is written when this many times as many steps are known, or when a size's time has changed by this factor.
WRITTEN_EVERY = 4
WRITTEN_CHANGE = 1.1


class StepTimesTable:
    """The estimated step times of a model in this process, shared by all decoders and threads that use the model.

    Args:
        file: file that keeps the estimate for later processes.
        estimate: the estimate to begin with.

    Attributes:
        estimate: the current estimate; other threads may replace it by a later one.
    """

    def __init__(self, file: StepTimesFile, estimate: Estimate) -> None:
        self.file = file
        self.estimate = estimate
        self._written = estimate
        self._lock = Lock()
        self._pending: list[TimedStep] = []

    def add(self, step: TimedStep) -> bool:
        """Learn from the measured time of a step that computed one sequence alone.

        Args:
            step: the number of tokens in the step, and its seconds.

        Returns:
            Whether the estimate has changed, which it does only once enough new steps have been added.
        """
        with self._lock:
            self._pending.append(step)
            if len(self._pending) < min(max(self.estimate.steps // 2, FEWEST_STEPS), MOST_STEPS):
                return False
            self.estimate = self.estimate.after(self._pending)
            self._pending = []
            if self._is_news():
                self._written = self.estimate
                self.file.write(self.estimate)
            return True

    def _is_news(self) -> bool:
        if self.estimate.steps >= WRITTEN_EVERY * max(self._written.steps, 1):
            return True
        moved = np.abs(_ratios(self.estimate) - _ratios(self._written)).max()
        return bool(moved > np.log(WRITTEN_CHANGE)) and self.estimate.steps >= self._written.steps + 2 * MOST_STEPS


def _ratios(estimate: Estimate) -> np.ndarray:
    """Logarithm of each size's step time divided by the plain step's: (sizes,)."""
    ratios: np.ndarray = estimate.mean[1:] - estimate.mean[0]
    return ratios


class GivenStepTimes:
    """Step times that a user gave to a decoder; they never change.

    The subclass `KnownStepTimes` has step times that are learned.

    Args:
        times: seconds of a step by its number of tokens, equal on every rank.

    Attributes:
        times: the step times as they are known now.
        careful: the step times that budgets decide by; a step size with few measurements counts as slower than
            estimated.
        origin: phrase that tells a user where the times come from; empty for given ones.
    """

    def __init__(self, times: StepTimes) -> None:
        self.times = self.careful = times

    @property
    def origin(self) -> str:
        return ""

    def observe(self, step: TimedStep) -> StepTimes | None:
        """Learn from a step that computed one sequence alone; given times never change, so this returns None.

        Args:
            step: the number of tokens in the step, and its seconds.

        Returns:
            Step times that the running request uses from now on; None: its step times stay as they are.
        """
        return None

    def update(self) -> None:
        """Take over the step times that rank 0 has learned; every rank calls it before a request begins.

        Given times never change, so that there is nothing to do here.
        """


class KnownStepTimes(GivenStepTimes):
    """Step times of a decoder from its model's table, which the decoder's own steps correct.

    The table begins with the file in the user's cache folder, or with a first guess from timing one layer, which takes
    less than a second. On one rank, corrections hold from the next step on. If there are several ranks, rank 0's
    corrections hold for all ranks from the next request on.

    Args:
        runner, config, context: the decoder's forward passes, step shape and ranks.
        again: begin with the first guess, even if there is a file or a table.
    """

    def __init__(
        self, runner: ModelRunner, config: LookaheadConfig, context: ParallelContext, again: bool = False
    ) -> None:
        self._context = context
        self._threads = torch.get_num_threads() if runner.device.type == "cpu" else 0
        # The lock gives threads that make a model's first decoders at the same time one table. Ranks take no lock:
        # they may be threads that share the model, and they wait for each other within the call.
        with lock_of(runner.original) if context.alone else nullcontext():
            self._table = _table_of(runner, config, context, again)
        self._take(self._table.estimate)
        self.update()

    @property
    def origin(self) -> str:
        return describe_origin(self._table.file.path, self._table.estimate, self._threads)

    def _take(self, estimate: Estimate) -> None:
        self.times, self.careful = estimate.times, estimate.careful

    def observe(self, step: TimedStep) -> StepTimes | None:
        if not self._context.is_main or not self._table.add(step) or not self._context.alone:
            return None
        self._take(self._table.estimate)
        return self.careful

    def update(self) -> None:
        estimate = self._table.estimate
        if self._context.alone:
            self._take(estimate)
            return
        both = [each for times in (estimate.times, estimate.careful) for each in (times.plain_s, *times.seconds)]
        words = exchange(
            self._context.ranks,
            "correcting step times",
            np.frombuffer(struct.pack(f"{len(both)}d", *both), np.int64).tolist(),
        )
        first, second = words[0].numpy().view(np.float64).reshape(2, -1).tolist()
        self.times, self.careful = (
            StepTimes(estimate.num_tokens, tuple(each[1:]), each[0]) for each in (first, second)
        )


def _table_of(runner: ModelRunner, config: LookaheadConfig, context: ParallelContext, again: bool) -> StepTimesTable:
    """Find or make the table of step times for a decoder; rank 0 decides for all ranks what it begins with."""
    file = step_times_file(runner, config, context)
    tables = runner.step_times
    known: StepTimesTable | None = None if again else tables.get(file.path.name)
    if context.alone and known:
        return known
    text = None
    if context.is_main and not again:
        text = json.dumps(known.estimate.as_json()) if known else file.text()
    text = context.share_text(text, "looking for step times")
    stored = read_estimate(text) if text else None
    if known is None or stored is None:
        known = tables[file.path.name] = StepTimesTable(file, stored or _prior(runner, config, context))
    return known


def _prior(runner: ModelRunner, config: LookaheadConfig, context: ParallelContext) -> Estimate:
    with context.setting_up("timing a layer"):
        pass_s = time_passes(runner)
    mine = torch.tensor([pass_s[size] for size in TIMED_SIZES], dtype=torch.float64)
    seconds = context.ranks.broadcast(mine, 0).tolist()
    times = prior_times(dict(zip(TIMED_SIZES, seconds, strict=True)), min(step_tokens(config), SIZES[-1]))
    return Estimate.of_prior(times)


def step_times_file(runner: ModelRunner, config: LookaheadConfig, context: ParallelContext) -> StepTimesFile:
    """The file that keeps a decoder's step times: one file for each combination of model, machine and settings.

    Args:
        runner, config, context: the decoder's forward passes, step shape and ranks.
    """
    model = runner.model
    config_without_pool = replace(
        config, pool_scope=PoolScope.REQUEST, pool_file=None, pool_model_ngrams="off", corpora=(), history=None
    )
    key_parts = (
        model.config.to_json_string(),
        str(model.dtype),
        context.steps.size,
        *([context.replica.size] if context.replica.size > 1 else []),
        context.backend,
        env_int("LOCAL_WORLD_SIZE", 1),
        runner.attention,
        runner.fused,
        *([str(runner.kv_dtype)] if runner.kv_dtype is not KVDtype.AUTO else []),
        runner.captured and not runner.captured.reserved and runner.captured.mode,
        repr(config_without_pool),
        *machine_key(runner.device),
    )
    about = {
        "model": Path(model.config.name_or_path or type(model).__name__).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(runner.device),
        "threads": torch.get_num_threads(),
        "ranks": context.steps.size,
        "attention": runner.attention,
    }
    return StepTimesFile(about, key_parts, vars(runner.original).setdefault("_lp_step_times", {}))
