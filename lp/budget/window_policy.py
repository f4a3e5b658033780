"""How many columns the lookahead window gets: as many as raise the tokens per step by more than they cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp.budget.running_ratio import MEMORY_STEPS, PRIOR_STEPS, RunningRatio
from lp.budget.step_times import StepTimes
from lp.config import LookaheadConfig

# Numbers of columns to choose from: powers of two.
WINDOW_SIZES = (0, 2, 4, 8, 16, 32, 64, 128)
# A window raises S by this share at most. Fitted on the demo model; at first 0.07, from T = 0.8 alone. It is not
# learned from the text at hand.
LARGEST_GAIN = 0.02
# So many columns bring half of that. Fitted on the demo model at T = 0.8.
HALF_GAIN_COLUMNS = 3.0


class WindowPolicy:
    """Chooses the next step's number of window columns under the adaptive budget: what would have paid most lately.

    For each possible number of columns, the draft trees of the last steps are priced again: each tree is cut to the
    number of draft tokens that pays most beside such a window. Trees are priced one by one, because at their average
    size two columns would seem to cost nothing if steps of one token and steps of four tokens alternate.

    Args:
        config: settings with N, and with `window_size`, the most columns for each rank; the largest window has
            `window_size` * `ranks` columns, all on one rank.
        step_times: table of the seconds that a step takes, by the number of tokens of a rank. A window gets at most
            half of the largest number in the table, so that there is room for draft tokens even if columns cost
            nothing.
        price_per_s: generated tokens that a second of step time must bring, before the first step.
        ranks: number of ranks among which the draft tokens are divided.
    """

    def __init__(self, config: LookaheadConfig, step_times: StepTimes, price_per_s: float, ranks: int = 1) -> None:
        self._ngram_size = config.ngram_size
        self._ranks = ranks
        largest = max(step_times.max_tokens // 2, 1)
        columns = config.window_size * ranks
        self._sizes = [size for size in WINDOW_SIZES if size <= columns and self.num_tokens(size) <= largest]
        sizes = np.array(self._sizes)
        self._window_tokens = np.array([self.num_tokens(size) for size in self._sizes])
        self.take(step_times)
        self._gains = LARGEST_GAIN * sizes / (sizes + HALF_GAIN_COLUMNS)
        self._worth = RunningRatio(PRIOR_STEPS * self._worths((), price_per_s), PRIOR_STEPS, MEMORY_STEPS)

    def take(self, step_times: StepTimes) -> None:
        """Use another table of step times from now on; it must be as long as the first table."""
        # More tokens than the step times know are not to be had.
        self._seconds = np.append(step_times.seconds_by_tokens, np.inf)

    def num_tokens(self, columns: int) -> int:
        """Number of step tokens that a window with `columns` columns takes, including the newest token of the text."""
        return max(columns, 1) + columns * (self._ngram_size - 2)

    def columns(self, tokens_per_step: float) -> int:
        """Choose the number of window columns for the next step.

        Args:
            tokens_per_step: average number of tokens that the last steps generated; a window is expected to raise it by
                a fraction.
        """
        return self._sizes[int((self._worth.ratio + tokens_per_step * self._gains).argmax())]

    def record_step(
        self, accept_probs: Sequence[float] | np.ndarray, price_per_s: float, other_tokens: int = 0
    ) -> None:
        """Learn from a step's draft tree how many window columns would have paid beside it.

        Args:
            accept_probs: accept probabilities of the step's draft tokens, the largest first.
            price_per_s: generated tokens that a second of step time must bring.
            other_tokens: number of step tokens on a rank that belong to other texts.
        """
        self._worth.add(self._worths(accept_probs, price_per_s, other_tokens), 1)

    def _worths(
        self, accept_probs: Sequence[float] | np.ndarray, price_per_s: float, other_tokens: int = 0
    ) -> np.ndarray:
        """Worth of each window size, (sizes,): expected tokens of the draft tree cut where it pays most, less price."""
        window = self._window_tokens[:, None]
        drafts = np.arange(len(accept_probs) + 1)
        # Of the largest rank: the one with the window, or any if all have as many tokens.
        num_tokens = np.maximum(window, -(-(window + drafts + self._ranks - 1) // self._ranks))
        seconds = self._seconds[np.minimum(other_tokens + num_tokens, len(self._seconds) - 1)]
        expected = np.cumsum([0.0, *accept_probs])
        worth: np.ndarray = (expected - price_per_s * seconds).max(1)
        return worth
