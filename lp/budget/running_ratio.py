"""A running ratio: the kind of average by which the token budget estimates rates and probabilities."""

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
        numerator: first value of the sum in the numerator; an array holds several ratios with a common denominator.
        denominator: first value of the sum in the denominator.
        memory: about how many of the last values count; each new value scales the sums before it by 1 - 1 / memory.
    """

    def __init__(self, numerator: Value, denominator: float, memory: float) -> None:
        self._numerator: Value = numerator
        self._denominator = denominator
        self._decay = 1 - 1 / memory

    def add(self, numerator: Value, denominator: float) -> None:
        """Let the older values in both sums fade, then add a new value to each sum.

        Args:
            numerator: value to add to the sum in the numerator.
            denominator: value to add to the sum in the denominator.
        """
        self._numerator = self._decay * self._numerator + numerator
        self._denominator = self._decay * self._denominator + denominator

    @property
    def ratio(self) -> Value:
        """The sum in the numerator, divided by the sum in the denominator, which must not be 0."""
        return self._numerator / self._denominator
