"""What is known of step times, and how surely: begun by a prior, corrected by the steps of texts.

The logarithms of the step times of all sizes are unknowns with a normal distribution, of which the mean and the
covariance are kept. Steps that were taken one after the other tell what their sizes take in relation to each other: how
busy the machine was is one more unknown, which they share.

n: sizes, and the plain step before them.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from lp.budget.step_times import StepTimes
from lp.errors import UserError

# Standard deviations of logarithms, about relative errors. How far the prior may be off: of the level of all sizes, of
# a step's own host work (a plain step against one of a token), and of twice as many tokens. Set by hand: of the models
# in docs/experiments/budget.md, the prior is off by less.
LEVEL = 1.0
HOST_WORK = 0.1
PER_DOUBLING = 0.12
# By how much a single step differs from others of its size, before the steps themselves tell; this counts as so many.
STEP_NOISE = 0.15
NOISE_STEPS = 8
# By how much the median of a size is off, however many steps it is of: a machine is not equally busy throughout, and
# texts get longer.
DRIFT = 0.04
# By how much a machine is slower at one time than at another.
LOAD = 0.5
# Of so many steps, the earlier ones are forgotten: a machine may change, and so may texts.
MEMORY_STEPS = 2_000
# How many standard deviations a step is taken to cost more than is known, beside a plain step.
CAUTION = 1.0
DIGITS = 7  # of a second: a file of step times is for people, too


class TimedStep(NamedTuple):
    """A step that computed nothing else than one text.

    Attributes:
        num_tokens: how many it computed, padding included; 0 for a plain step.
        seconds: how long it took.
    """

    num_tokens: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Estimate:
    """Step times as far as they are known.

    Args:
        num_tokens: sizes, ascending from 1.
        mean: expected logarithms of seconds, the plain step's first, (n,).
        covariance: how unsure these logarithms are, (n, n).
        steps: how many steps it was learned from.
    """

    num_tokens: tuple[int, ...]
    mean: np.ndarray
    covariance: np.ndarray
    steps: int = 0

    @classmethod
    def of_prior(cls, times: StepTimes) -> Estimate:
        """The estimate before any step was timed: these times, with the doubts of a prior."""
        return cls(times.num_tokens, np.log([times.plain_s, *times.seconds]), _prior_covariance(times.num_tokens))

    @cached_property
    def times(self) -> StepTimes:
        """The step times that are most likely by what was observed."""
        plain_s, *seconds = (round(value, DIGITS) for value in np.exp(self.mean).tolist())
        least = 10.0**-DIGITS
        return StepTimes(self.num_tokens, tuple(max(each, least) for each in seconds), max(plain_s, least))

    @cached_property
    def doubts(self) -> np.ndarray:
        """Standard deviation of log(time of a step / time of a plain step) for every size, (n - 1,)."""
        covariance = self.covariance
        variances = np.diag(covariance)[1:] + covariance[0, 0] - 2 * covariance[0, 1:]
        doubts: np.ndarray = np.sqrt(np.maximum(variances, 0))
        return doubts

    @cached_property
    def careful(self) -> StepTimes:
        """Step times by which a draft token must pay although its step may take longer than is known.

        Doubt alone is no reason to pad a step: a size takes no longer than a larger one, unless it is known to.
        """
        times = self.times
        seconds = np.array(times.seconds) * np.exp(CAUTION * self.doubts)
        for index in range(len(seconds) - 2, -1, -1):
            size = self.num_tokens[index]
            if times.padded_size(size) == size:
                seconds[index] = min(seconds[index], max(seconds[index + 1], times.seconds[index]))
        return StepTimes(self.num_tokens, tuple(seconds.tolist()), times.plain_s)

    def after(self, steps: Sequence[TimedStep]) -> Estimate:
        """What is known after some steps that were taken one after the other."""
        by_size: dict[int, list[float]] = {}
        for step in steps:
            if step.num_tokens <= self.num_tokens[-1] and 0 < step.seconds < float("inf"):
                by_size.setdefault(self._index(step.num_tokens), []).append(math.log(step.seconds))
        if not by_size:
            return self
        num_steps = sum(map(len, by_size.values()))
        sizes = [*by_size]
        counts = np.array([len(each) for each in by_size.values()])
        found = np.array([sorted(each)[(len(each) - 1) // 2] for each in by_size.values()])
        fresh = min(num_steps / MEMORY_STEPS, 1.0)
        covariance = (1 - fresh) * self.covariance + fresh * _prior_covariance(self.num_tokens)
        surprise = found - self.mean[sizes]
        usual = surprise[counts.argmax()]
        # A few steps may all have been disturbed; many were not.
        disturbed = (np.maximum(np.abs(surprise - usual) - STEP_NOISE, 0) / (2 * counts**1.5)) ** 2
        noise = _noise(by_size.values()) ** 2 / counts + DRIFT**2 + disturbed
        shared = covariance[:, sizes]
        gain = shared @ np.linalg.inv(shared[sizes] + np.diag(noise) + LOAD**2)
        left = covariance - gain @ shared.T
        return Estimate(self.num_tokens, self.mean + gain @ surprise, (left + left.T) / 2, self.steps + num_steps)

    def _index(self, num_tokens: int) -> int:
        """The place of the size that this one is nearest to; the plain step's is 0."""
        if not num_tokens:
            return 0
        sizes = self.num_tokens
        above = min(bisect_left(sizes, num_tokens), len(sizes) - 1)
        below = max(above - 1, 0)
        return 1 + (below if num_tokens**2 <= sizes[below] * sizes[above] else above)  # by the ratio

    def as_json(self) -> dict[str, Any]:
        """The times for a file that people can read: seconds by tokens, doubts in per cent and what they come from."""
        names = ["plain", *map(str, self.num_tokens)]
        seconds = [self.times.plain_s, *self.times.seconds]
        return {
            "seconds": dict(zip(names, seconds, strict=True)),
            "doubts in per cent": dict(zip(names[1:], np.round(100 * self.doubts, 1).tolist(), strict=True)),
            "steps": self.steps,
            "covariance": [json.dumps(row) for row in np.round(self.covariance, 6).tolist()],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Estimate:
        """The estimate that `as_json` wrote.

        Raises:
            ValueError, TypeError, KeyError, IndexError, OverflowError: it is something else.
        """
        seconds = dict(found["seconds"])
        plain_s = seconds.pop("plain")
        times = StepTimes(tuple(map(int, seconds)), tuple(seconds.values()), plain_s)
        rows = np.array([json.loads(row) for row in found["covariance"]], np.float64)
        n = 1 + len(times.num_tokens)
        if rows.shape != (n, n) or not np.isfinite(rows).all() or np.linalg.eigvalsh(rows)[0] < -1e-4:
            raise UserError("no covariance")
        known = cls(times.num_tokens, np.log([plain_s, *times.seconds]), (rows + rows.T) / 2, int(found["steps"]))
        with np.errstate(over="ignore"):
            _ = known.careful  # here, and not in a decode step: doubts may make it infinite
        return known


def _noise(by_size: Any) -> float:
    """How much steps differ from others of their size, by the median deviation, which outliers do not change."""
    deviations: list[float] = []
    for each in by_size:
        if len(each) > 2:
            middle = median(each)  # once: this is part of a decode step
            deviations += [abs(value - middle) for value in each]
    if not deviations:
        return STEP_NOISE
    seen = 1.4826 * median(deviations)  # the standard deviation of a normal distribution
    count = len(deviations)
    return float(np.sqrt((NOISE_STEPS * STEP_NOISE**2 + count * seen**2) / (NOISE_STEPS + count)))


def _prior_covariance(num_tokens: tuple[int, ...]) -> np.ndarray:
    """Covariance before any step, (n, n): a level that all share, and sizes that share what smaller ones are off by."""
    doublings = np.log2(num_tokens)
    sizes = HOST_WORK**2 + PER_DOUBLING**2 * np.minimum(doublings[:, None], doublings)
    covariance = np.full((1 + len(num_tokens),) * 2, LEVEL**2)
    covariance[1:, 1:] += sizes
    return covariance
