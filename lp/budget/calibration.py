"""Corrects the accept probabilities that draft sources state, by how many draft tokens the last steps have accepted.

There are three corrections: a calibration factor for every token of a path, a depth discount for long paths, and a
bonus for exploration, since the n-gram pool learns even from rejected draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lp.budget.running_ratio import RunningRatio

# All constants here were fitted on the demo model (docs/experiments/budget.md).
# Where a measurement is on record, it is named.

# How many of the last steps the calibration looks back. It was 24 when calibration corrected whole paths; since it
# corrects every token it reacts faster.
CALIBRATION_STEPS = 8.0
# Draft tokens that count as accepted, just as expected, before the first step.
PRIOR_TOKENS = 4.0
# The calibration never falls below this, or no draft token would ever be tried again.
LEAST_CALIBRATION = 0.3
# A step without draft tokens counts as so many that were accepted just as expected: calibration drifts back to 1.
# Fitted on the HumanEval prompt that showed why: without it no draft token was tried again, at 0.3 x the speed.
DRIFT_TOKENS = 0.25

# The rule of succession: what held for n tokens holds for one more with n / (n + 1). Here n is this constant plus the
# most tokens that one of the last steps accepted. Fitted on HumanEval and MT-Bench, at T = 0 and 0.8.
PRIOR_DEPTH = 8.0
# The share of that most which is left after each further step. Fitted with PRIOR_DEPTH.
DEPTH_DECAY = 0.75

# What a draft token is worth even if it is rejected, in tokens of later steps, because its logits enter the pool.
# Fitted on the demo model at T = 0.8.
EXPLORATION_BONUS = 0.04
# How many draft tokens of a rank's step get that bonus. Fitted likewise, on one rank; on eight, one a rank is too few
# (docs/experiments/budget.md).
EXPLORATION_TOKENS = 8


class DraftRecord(NamedTuple):
    """How many draft tokens of one step, on all ranks together, were expected to be accepted, and how many were.

    Attributes:
        accept_probs: accept probabilities that draft sources stated for all draft tokens, the largest first.
        expected: number of draft tokens that were expected to be accepted, by the stated probabilities along the
            accepted path, each given that the token before it was accepted.
        accepted: number of draft tokens that were accepted.
    """

    accept_probs: Sequence[float] | np.ndarray = ()
    expected: float = 0.0
    accepted: int = 0


class Calibration:
    """Corrects accept probabilities by the ratio of accepted to expected draft tokens in the last steps.

    Stated probabilities may be wrong for a while. For example, if a text repeats itself with one token changed each
    time, the repeated path looks certain, and is rejected at this token each time.
    """

    def __init__(self) -> None:
        self._accepted_per_expected = RunningRatio(PRIOR_TOKENS, PRIOR_TOKENS, CALIBRATION_STEPS)

    @property
    def factor(self) -> float:
        """Factor (LEAST_CALIBRATION to 1) for each draft token's probability, given that its parent is accepted."""
        return min(max(self._accepted_per_expected.ratio, LEAST_CALIBRATION), 1.0)

    def record_step(self, drafts: DraftRecord) -> None:
        """Learn from a step for which the present `factor` was used.

        Args:
            drafts: how many of the step's draft tokens were expected to be accepted, and how many were.
        """
        if not len(drafts.accept_probs):
            self._accepted_per_expected.add(DRIFT_TOKENS, DRIFT_TOKENS)
            return
        self._accepted_per_expected.add(drafts.accepted, drafts.expected / self.factor)


class DepthDiscount:
    """Lowers accept probabilities of long paths: for d draft tokens in a row, by the factor 1 / (1 + per_token * d)."""

    def __init__(self) -> None:
        self._longest = 0.0  # most tokens that one of the last steps accepted, fading

    @property
    def per_token(self) -> float:
        """The constant x in the factor 1 / (1 + x * d), by which the probability of d tokens in a row is multiplied.

        It is smaller, so that long paths keep more of their probability, if one of the last steps accepted many tokens.
        """
        return 1 / (PRIOR_DEPTH + self._longest)

    def record_step(self, num_accepted: int) -> None:
        """Learn from a decode step how long accepted paths are.

        Args:
            num_accepted: number of draft tokens that the step accepted.
        """
        self._longest = max(num_accepted, DEPTH_DECAY * self._longest)


def exploration_bonus(accepted_per_step: float) -> float:
    """Value of a draft token even if it is rejected, in generated tokens: the n-gram pool learns from its logits.

    Args:
        accepted_per_step: average number of draft tokens that the last steps accepted; below 1, the bonus is smaller.
    """
    return EXPLORATION_BONUS * min(accepted_per_step, 1.0)
