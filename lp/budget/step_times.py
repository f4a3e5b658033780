"""Step times t(T): how long a step of T tokens takes; padding and the price of draft tokens are derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from lp.errors import UserError

# A step is padded to a larger size only if that takes less than this share of its time; less is noise of the
# measurement, and padding is real work.
PADDING_GAIN = 0.9
# Step times that differ by a smaller factor than this lead to the same decisions.
NEWS = 1.03
# Largest size whose times are tabulated token by token.
MAX_TABLE_TOKENS = 1 << 14
# Sizes that are printed.
SHOWN_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class StepTimes:
    """A table of how long a whole decode step (model, exchange between ranks, host) takes, by its number of tokens T.

    T includes the newest token of the text. Times between the given sizes are interpolated. Where a larger step is
    clearly faster than a smaller one, the smaller step is padded to the larger size.

    Args:
        num_tokens: sizes T in the table, ascending from 1.
        seconds: seconds that a step of each size takes.
        plain_s: seconds that a plain step takes, which generates one token without lookahead.

    Raises:
        ValueError: the sizes do not ascend from 1, or some seconds are not positive and finite.
    """

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    plain_s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", tuple(self.num_tokens))
        object.__setattr__(self, "seconds", tuple(self.seconds))
        from_1 = {*map(type, self.num_tokens)} == {int} and self.num_tokens[0] == 1
        ascending = all(a < b for a, b in zip(self.num_tokens, self.num_tokens[1:], strict=False))
        paired = len(self.num_tokens) == len(self.seconds)
        if not (from_1 and ascending and paired and self.max_tokens <= MAX_TABLE_TOKENS):
            raise UserError(
                f"step times have num_tokens {self.num_tokens} and seconds {self.seconds}; num_tokens must be integers "
                f"that ascend from 1 to at most {MAX_TABLE_TOKENS}, with one time each; remove their file, or mend them"
            )
        if not all(0 < value < float("inf") for value in (*self.seconds, self.plain_s)):
            raise UserError(
                f"step times have seconds {self.seconds} and plain_s {self.plain_s}; all must be positive and finite; "
                "remove their file, or mend them"
            )

    @classmethod
    def constant(cls, seconds: float, max_tokens: int) -> StepTimes:
        """Make a table in which steps of all sizes, and plain steps, take equally long; for tests and simulations.

        Args:
            seconds: seconds that every step takes.
            max_tokens: largest size in the table, in tokens.
        """
        return cls((1, max_tokens), (seconds, seconds), seconds)

    @property
    def max_tokens(self) -> int:
        """The largest size in the table, in tokens."""
        return self.num_tokens[-1]

    @cached_property
    def _unpadded_seconds(self) -> np.ndarray:
        """Seconds of a step that is not padded, by its tokens: float64 (max_tokens + 1,)."""
        return np.interp(np.arange(self.max_tokens + 1), self.num_tokens, self.seconds)

    @cached_property
    def _padded_sizes(self) -> list[int]:
        """How many tokens to compute by how many are needed, 0 to `max_tokens`: more where that is faster."""
        seconds = self._unpadded_seconds
        sizes = list(range(self.max_tokens + 1))
        fastest = self.max_tokens
        for size in range(self.max_tokens, 0, -1):
            if seconds[size] < seconds[fastest]:
                fastest = size
            elif seconds[fastest] < PADDING_GAIN * seconds[size]:
                sizes[size] = fastest
        return sizes

    def padded_size(self, num_tokens: int) -> int:
        """How many tokens to compute in a step that needs `num_tokens`: more tokens if a larger step is faster."""
        return self._padded_sizes[num_tokens] if num_tokens <= self.max_tokens else num_tokens

    @cached_property
    def seconds_by_tokens(self) -> np.ndarray:
        """Seconds of a step that needs 0, 1, ... max_tokens tokens, padded if that is faster (float64 array)."""
        padded = self._unpadded_seconds[self._padded_sizes]
        return np.minimum.accumulate(padded[::-1])[::-1].copy()  # contiguous: else compiled code is compiled twice

    def step_s(self, num_tokens: int) -> float:
        """Seconds of a step that needs `num_tokens` tokens; beyond the table, they grow in proportion to tokens."""
        if num_tokens <= self.max_tokens:
            return float(self.seconds_by_tokens[num_tokens])
        return float(self.seconds_by_tokens[-1] * num_tokens / self.max_tokens)

    @property
    def own_work_s(self) -> float:
        """Seconds of host work that drafting and learning add to a step.

        They are the time of a step of 1 token with drafting, less the time of a plain step. On a busy machine plain
        steps may seem slower than steps of 1 token; the result is then 0.
        """
        return max(self.step_s(1) - self.plain_s, 0.0)

    @cached_property
    def marginal_seconds(self) -> np.ndarray:
        """Least seconds that each further token costs, for steps that have 0, 1, ... max_tokens tokens so far.

        For each of these sizes, it is the least average time per added token over all larger sizes (infinite for the
        largest). A draft tree can stop growing by it: if the accept probability of the next draft token is below the
        price of this time, no larger step pays, since later tokens are even less likely.
        """
        seconds = self.seconds_by_tokens.tolist()
        marginal = np.full(self.max_tokens + 1, np.inf)
        corners = [self.max_tokens]  # corners of the lower convex hull of all larger sizes, the nearest last

        def slope(size: int, larger: int) -> float:
            return float((seconds[larger] - seconds[size]) / (larger - size))

        for size in range(self.max_tokens - 1, -1, -1):  # in one pass: new step times come between two steps of a text
            while len(corners) > 1 and slope(size, corners[-1]) >= slope(size, corners[-2]):
                corners.pop()
            marginal[size] = slope(size, corners[-1])
            corners.append(size)
        return marginal

    @cached_property
    def affordable_tokens(self) -> int:
        """Size in tokens, at least 1, of the largest step that takes no longer than two steps without lookahead."""
        return max(int(np.searchsorted(self.seconds_by_tokens, 2 * self.plain_s, "right")) - 1, 1)

    def __str__(self) -> str:
        times = " ".join(f"{size}:{1e3 * self.step_s(size):.2f}" for size in self.num_tokens if size in SHOWN_SIZES)
        line = f"t(T) in ms {times}, plain {1e3 * self.plain_s:.2f}"
        padded_sizes = sorted({padded for size, padded in enumerate(self._padded_sizes) if padded > size})
        return f"{line}; padded up to {padded_sizes}" if padded_sizes else line


@lru_cache(maxsize=16)  # what follows from them takes milliseconds, and every text of a batch has them
def extended(times: StepTimes, max_tokens: int) -> StepTimes:
    """Extend a table of step times to at least `max_tokens`, for steps that several texts share.

    Beyond the given table, the times grow in proportion to the number of tokens. The new table never exceeds
    MAX_TABLE_TOKENS.

    Args:
        times: the table to extend.
        max_tokens: largest size that is needed, in tokens.
    """
    max_tokens = min(max_tokens, MAX_TABLE_TOKENS)
    if max_tokens <= times.max_tokens:
        return times
    seconds = times.seconds[-1] * max_tokens / times.max_tokens
    return StepTimes((*times.num_tokens, max_tokens), (*times.seconds, seconds), times.plain_s)


def scaled(times: StepTimes, plain_s: float) -> StepTimes:
    """Multiply all step times by one factor, chosen so that a plain step takes `plain_s` seconds.

    Rates (tokens per second) calculated with another table stay comparable, if `plain_s` is the plain step's time
    there.

    Args:
        times: the table to scale.
        plain_s: seconds that a plain step (without lookahead) is to take.
    """
    share = plain_s / times.plain_s
    return StepTimes(times.num_tokens, tuple(share * each for each in times.seconds), plain_s)


def differ(times: StepTimes, others: StepTimes) -> bool:
    """Whether any time in two tables of step times differs by more than a factor of NEWS, which is enough to matter.

    Args:
        times, others: the two tables, which have the same sizes.
    """
    pairs = [(times.plain_s, others.plain_s), *zip(times.seconds, others.seconds, strict=False)]
    return any(max(pair) > NEWS * min(pair) for pair in pairs)
