"""A running ratio: the kind of average from which the token budget estimates its rates and probabilities."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

# How many of the last steps count in the running averages of the budget: of its rate, its accepted tokens and its
# windows. All constants of this package that name no measurement were fitted on the demo model
# (docs/experiments/budget.md).
MEMORY_STEPS = 12.0
# How many plain steps those averages begin with; the first real steps soon outweigh them.
PRIOR_STEPS = 4.0

Value = TypeVar("Value", float, np.ndarray)


class RunningRatio(Generic[Value]):
    """The ratio of two running sums in which older values fade, for example accepted draft tokens per step.

    Args:
        numerator: first value of the upper sum; an array holds several ratios that share the lower sum.
        denominator: first value of the lower sum.
        memory: about how many of the last values count: each new one scales the sums before it by 1 - 1 / memory.
    """

    def __init__(self, numerator: Value, denominator: float, memory: float) -> None:
        self._numerator: Value = numerator
        self._denominator = denominator
        self._decay = 1 - 1 / memory

    def add(self, numerator: Value, denominator: float) -> None:
        """Add a new value to each of the two sums, and let the older values fade."""
        self._numerator = self._decay * self._numerator + numerator
        self._denominator = self._decay * self._denominator + denominator

    @property
    def ratio(self) -> Value:
        """Upper sum over lower sum; the lower one must not be 0."""
        return self._numerator / self._denominator
