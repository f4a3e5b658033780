"""How far the accept probabilities of a draft tree can be trusted, learned from the last steps of the text.

The draft source states for every draft token the probability that it is accepted. Three corrections apply to it:
a calibration factor for every token of a path, a depth discount for long paths, and a bonus for exploring.
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
    """What became of the draft tokens of a step, on all ranks.

    Attributes:
        accept_probs: accept probabilities of all draft tokens, the most likely first.
        expected: how many the probabilities expected to be accepted along the text, each given the ones before it.
        accepted: how many of them the text has.
    """

    accept_probs: Sequence[float] | np.ndarray = ()
    expected: float = 0.0
    accepted: int = 0


class Calibration:
    """How many draft tokens were accepted for each one expected, over the last steps.

    A loop whose turns differ by a token breaks at the same token each time, on a path that looked certain.
    """

    def __init__(self) -> None:
        self._accepted_per_expected = RunningRatio(PRIOR_TOKENS, PRIOR_TOKENS, CALIBRATION_STEPS)

    @property
    def factor(self) -> float:
        """Multiplies the probability of every draft token, given the one before it; LEAST_CALIBRATION to 1."""
        return min(max(self._accepted_per_expected.ratio, LEAST_CALIBRATION), 1.0)

    def record_step(self, drafts: DraftRecord) -> None:
        """Learn from a step whose tree was grown with the present factor."""
        if not len(drafts.accept_probs):
            self._accepted_per_expected.add(DRIFT_TOKENS, DRIFT_TOKENS)
            return
        self._accepted_per_expected.add(drafts.accepted, drafts.expected / self.factor)


class DepthDiscount:
    """How much less likely a path is the longer it gets: d tokens hold with 1 / (1 + per_token x d)."""

    def __init__(self) -> None:
        self._longest = 0.0  # most tokens that one of the last steps accepted, fading

    @property
    def per_token(self) -> float:
        """The discount that each token of a path brings, by the depths that were accepted lately."""
        return 1 / (PRIOR_DEPTH + self._longest)

    def record_step(self, num_accepted: int) -> None:
        """Learn from a step that accepted so many draft tokens."""
        self._longest = max(num_accepted, DEPTH_DECAY * self._longest)


def exploration_bonus(accepted_per_step: float) -> float:
    """What exploring is worth, in tokens; less where fewer than one draft token a step is accepted."""
    return EXPLORATION_BONUS * min(accepted_per_step, 1.0)
