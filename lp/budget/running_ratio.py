"""A running ratio: the average that the token budget's estimates are made of."""

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
    """The ratio of two sums, in which older values count less and less.

    Args:
        numerator: what to begin with; an array holds several ratios with one denominator.
        denominator: what to begin with.
        memory: how many of the last values count, about: each new one scales the sums before it by 1 - 1 / memory.
    """

    def __init__(self, numerator: Value, denominator: float, memory: float) -> None:
        self._numerator: Value = numerator
        self._denominator = denominator
        self._decay = 1 - 1 / memory

    def add(self, numerator: Value, denominator: float) -> None:
        """Add to both sums."""
        self._numerator = self._decay * self._numerator + numerator
        self._denominator = self._decay * self._denominator + denominator

    @property
    def ratio(self) -> Value:
        """Numerator over denominator; something must have been added, or been there to begin with."""
        return self._numerator / self._denominator
