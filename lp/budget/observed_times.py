"""Learns step times from the steps of texts, starting from a prior, and keeps track of how reliable they are.

The size of a step is its number of tokens. A plain step generates one token without lookahead. The logarithms of the
step times of all sizes are unknowns with a joint normal distribution, whose mean and covariance are kept. Steps that
run one after the other tell how the times of their sizes relate to each other. How busy the machine was meanwhile is
one more unknown, which all these steps share.

n: number of sizes plus 1, for the plain step, which comes first.
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

# Standard deviations of logarithms, which are about relative errors. How far the prior may be off: in the level of all
# sizes, in a step's own host work (a plain step against one of a token), and in what twice as many tokens take. Set by
# hand: for the models in docs/experiments/budget.md, the prior is off by less.
LEVEL = 1.0
HOST_WORK = 0.1
PER_DOUBLING = 0.12
# By how much a single step differs from others of its size, until steps tell; the figure counts as so many steps.
STEP_NOISE = 0.15
NOISE_STEPS = 8
# By how much the median of a size is off, however many steps it is taken from: a machine is not equally busy all the
# time, and texts get longer.
DRIFT = 0.04
# By how much a machine is slower at one time than at another.
LOAD = 0.5
# Steps before the last so many are forgotten, by and by: a machine may change, and so may texts.
MEMORY_STEPS = 2_000
# A step is assumed to take longer than expected, against a plain step, by so many standard deviations.
CAUTION = 1.0
DIGITS = 7  # decimal places of seconds in a file, which is for people, too


class TimedStep(NamedTuple):
    """A measured decode step of a single text, from which step times are learned.

    Attributes:
        num_tokens: number of tokens that the step computed, padding included; 0 for a plain step (no lookahead).
        seconds: duration of the step.
    """

    num_tokens: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Estimate:
    """What is known so far about step times, and how reliably; immutable, as `after` returns a new estimate.

    Args:
        num_tokens: sizes of steps in tokens, ascending from 1.
        mean: float64 (n,), expected logarithms of seconds: first for a plain step (no lookahead), then for a step of
            each size; n is the number of sizes plus 1.
        covariance: float64 (n, n), covariance of these logarithms.
        steps: number of measured steps from which the estimate was learned.
    """

    num_tokens: tuple[int, ...]
    mean: np.ndarray
    covariance: np.ndarray
    steps: int = 0

    @classmethod
    def of_prior(cls, times: StepTimes) -> Estimate:
        """Make the first estimate, before any step was timed, from prior step times, which are taken as very unsure.

        Args:
            times: prior step times.
        """
        return cls(times.num_tokens, np.log([times.plain_s, *times.seconds]), _prior_covariance(times.num_tokens))

    @cached_property
    def times(self) -> StepTimes:
        """The expected step times, as a table."""
        plain_s, *seconds = (round(value, DIGITS) for value in np.exp(self.mean).tolist())
        least = 10.0**-DIGITS
        return StepTimes(self.num_tokens, tuple(max(each, least) for each in seconds), max(plain_s, least))

    @cached_property
    def doubts(self) -> np.ndarray:
        """Relative uncertainty of the time of each size: standard deviation of log(step time / plain step's time).

        It is a float64 array with one value for each size; 0.08 means about 8 %.
        """
        covariance = self.covariance
        variances = np.diag(covariance)[1:] + covariance[0, 0] - 2 * covariance[0, 1:]
        doubts: np.ndarray = np.sqrt(np.maximum(variances, 0))
        return doubts

    @cached_property
    def careful(self) -> StepTimes:
        """Pessimistic step times, by which the adaptive budget decides: longer than expected where they are unsure.

        So draft tokens have to promise more if steps of the resulting size were rarely timed. A plain step's time is as
        expected. Uncertainty alone does not make a size slower than the next larger size, since steps would be padded
        for no reason.
        """
        times = self.times
        seconds = np.array(times.seconds) * np.exp(CAUTION * self.doubts)
        for index in range(len(seconds) - 2, -1, -1):
            size = self.num_tokens[index]
            if times.padded_size(size) == size:
                seconds[index] = min(seconds[index], max(seconds[index + 1], times.seconds[index]))
        return StepTimes(self.num_tokens, tuple(seconds.tolist()), times.plain_s)

    def after(self, steps: Sequence[TimedStep]) -> Estimate:
        """Return a new estimate that takes measured steps into account; the same estimate if no step is usable.

        Args:
            steps: measured steps, which ran one after the other.
        """
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
        """Index in `mean` of the size nearest to a number of tokens, by ratio; 0 for a plain step (0 tokens)."""
        if not num_tokens:
            return 0
        sizes = self.num_tokens
        above = min(bisect_left(sizes, num_tokens), len(sizes) - 1)
        below = max(above - 1, 0)
        return 1 + (below if num_tokens**2 <= sizes[below] * sizes[above] else above)  # by the ratio

    def as_json(self) -> dict[str, Any]:
        """Convert the estimate to JSON that people can read.

        It contains the seconds and their uncertainty by number of tokens, the number of measured steps, and the
        covariance.
        """
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
        """Build an estimate from JSON that `as_json` has written, and that a person may have edited.

        Raises:
            ValueError, TypeError, KeyError, IndexError, OverflowError: the JSON does not describe an estimate.
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
    """Standard deviation of steps from others of their size, by the median deviation, which outliers hardly change."""
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
    """Covariance of the prior, (n, n): all sizes share one error, and larger ones the errors of smaller ones."""
    doublings = np.log2(num_tokens)
    sizes = HOST_WORK**2 + PER_DOUBLING**2 * np.minimum(doublings[:, None], doublings)
    covariance = np.full((1 + len(num_tokens),) * 2, LEVEL**2)
    covariance[1:, 1:] += sizes
    return covariance
