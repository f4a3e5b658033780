"""How many columns and candidate rows a step gets: always the same, or what pays.

A text takes least time if every step maximises its tokens less rate x seconds, where rate is the tokens a second that
the steps around it reach: a row pays while its chance of being accepted exceeds rate x what it costs.
All figures are replicated: chances, accepted tokens, and times that are rank 0's curve, never a rank's own clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from lp.budget.step_times import StepTimes
from lp.compiled import given
from lp.config import LookaheadConfig
from lp.draft.source import TokenPrice
from lp.draft.tree import DraftTree

MEMORY, BEFORE = 12.0, 4.0  # steps that the running rate looks back; plain steps that it begins with
TRUST, DOUBT = 8.0, 4.0  # the same of how far chances are true: steps, and tokens that came as foretold to begin with
LEAST_TRUE, DRIFT = 0.3, 0.25  # or what is not believed would never be tried again; tokens of a step that promised none
# By the rule of succession what held for n tokens holds for one more with n / (n + 1): n is HOLD and what the best of
# the last steps accepted, which fades.
HOLD, FADE = 8.0, 0.75
LESSON, LESSONS = 0.04, 8  # tokens that a step's first rows bring later, by the logits they leave: the demo model's
CAUTION = 1.25  # times the price: of all rows, those are taken whose chance looks best, and it is less than it looks
LADDER = (0, 2, 4, 8, 16, 32, 64, 128)  # columns
GAIN, HALF = 0.02, 3.0  # by how much columns raise S at most, and how many bring half of it: the demo model's
TRIAL, RETRIAL = 8, 2  # steps that lookahead has to show that it pays, at first and after a nap
LEAST, BEARABLE = 0.95, 0.8  # of plain decoding's rate, below which it does not pay: if nothing is accepted, and at all
HOT = 1.5  # a temperature that leaves nothing to guess, until the text shows otherwise: the demo model's
ECHO = 4  # tokens that, said again, end a nap
SHORTEST_NAP, LONGEST_NAP, HOT_NAP = 4, 64, 128  # plain steps before it may try again, twice as many each time


class Budget(Protocol):
    """Decides, alike on every rank, what the next step takes."""

    columns: int
    idle: bool  # the next step guesses nothing and learns nothing
    most: int  # rows that a step may be padded to
    reads_prompt: bool  # the logits of its rows are read, if the config has it so

    @property
    def rows(self) -> int:
        """Candidate rows at most."""
        ...

    @property
    def price(self) -> TokenPrice:
        """Of the next step's rows."""
        ...

    def padded(self, rows: int) -> int:
        """How many rows this rank should run for so many."""
        ...

    def observe(self, new: Sequence[int], rows: int, tree: DraftTree) -> None:
        """A step of so many rows, padding excluded, with these candidates brought new tokens; 0 rows: an idle one."""
        ...


class FixedBudget:
    """W columns and G x (N - 1) rows, every step."""

    idle, most, reads_prompt = False, 0, True

    def __init__(self, config: LookaheadConfig) -> None:
        self.columns, self.rows = config.window_size, config.draft_budget
        self.price = TokenPrice.free(config.draft_budget)

    def padded(self, rows: int) -> int:
        """As they are."""
        return rows

    def observe(self, new: Sequence[int], rows: int, tree: DraftTree) -> None:
        """Nothing changes."""


class _Running:
    """A ratio of two sums that forget, or of several to one."""

    def __init__(self, above: Any, below: float, memory: float) -> None:
        self.above, self.below, self.keep = above, below, 1 - 1 / memory

    def add(self, above: Any, below: float) -> None:
        self.above, self.below = self.keep * self.above + above, self.keep * self.below + below

    @property
    def ratio(self) -> Any:
        return self.above / self.below


class _Echo:
    """Tells whether a text says again what it said before."""

    def __init__(self) -> None:
        self._last, self._said = tuple[int, ...](), set[tuple[int, ...]]()

    def heard(self, new: Sequence[int]) -> bool:
        """Whether the text with these new tokens ends in a run that was there before."""
        again = False
        for token in new:
            self._last = (*self._last[1 - ECHO :], token)
            again = self._last in self._said
            self._said.add(self._last)
        return again


class AdaptiveBudget:
    """What pays, by the curve and by what steps brought.

    Args:
        config: its W and G are bounds.
        curve: what steps take, by the rows of all ranks together.
        ranks: that share them.
        temperature: of sampling from all tokens, 0 if there is none.
    """

    reads_prompt = False  # each costs a row of the LM head, and all of them bring less than that

    def __init__(self, config: LookaheadConfig, curve: StepTimes, ranks: int = 1, temperature: float = 0.0) -> None:
        self.config, self.curve, self.most, self.idle, self.ranks = config, curve, curve.most, False, ranks
        self._table, self._slopes = given(curve.table), given(curve.slopes)
        self._rate = _Running(BEFORE, BEFORE * curve.plain_s, MEMORY)
        self._truth = _Running(DOUBT, DOUBT, TRUST)
        self._accepted = _Running(BEFORE, BEFORE, MEMORY)  # tokens, a step
        self._awake, self._trial, self._nap = _Running(0.0, 0.0, 2 * TRIAL), TRIAL, SHORTEST_NAP
        self._brought, self._echo = _Running(0.0, 0.0, 2 * TRIAL), _Echo()  # as `_accepted`, of steps alone
        self._woken = self._deaf = False  # by an echo; to echoes, since the last one led nowhere
        self._run = 0.0  # tokens that the best of the last steps accepted
        half = max(curve.most // 2, 1)  # or a window that costs nothing would leave candidates no room
        self._ladder = [size for size in LADDER if size <= config.window_size and self._window(size) <= half]
        self._windows = np.array([self._window(size) for size in self._ladder])
        self._costs = np.append(curve.table, np.inf)  # more rows than the curve knows are not to be had
        self._gains = GAIN * np.array(self._ladder) / (np.array(self._ladder) + HALF)
        self._beside = _Running(BEFORE * self._worths(()), BEFORE, MEMORY)  # each window, what a step was worth
        self.columns, self._longest = self._columns(), LONGEST_NAP
        if temperature >= HOT:
            self._nap = self._longest = HOT_NAP
            self._doze()

    @property
    def rate(self) -> float:
        """Tokens a second around here."""
        return max(self._rate.ratio, 1 / self.curve.plain_s)

    @property
    def rows(self) -> int:
        """Candidate rows at most: what the config allows and the curve knows."""
        return min(self.config.draft_budget, self.curve.most - self._window(self.columns))

    @property
    def price(self) -> TokenPrice:
        """Of the next step's rows."""
        base, lesson = self._window(self.columns), LESSON * min(self._accepted.ratio, 1.0)
        terms = base, self._table, self._slopes, lesson, LESSONS, self._believed, 1 / (HOLD + self._run)
        return TokenPrice(CAUTION * self.rate, *terms)

    @property
    def _believed(self) -> float:
        """Of a chance. A loop whose turns differ breaks at the same token each time, on a path that looked sure."""
        return min(max(self._truth.ratio, LEAST_TRUE), 1.0)

    def padded(self, rows: int) -> int:
        """More where that is cheaper; a rank has about its share of a step that the curve knows."""
        together = 1 + (rows - 1) * self.ranks
        return max(rows, 1 + -(-(self.curve.padded(together) - 1) // self.ranks))

    def observe(self, new: Sequence[int], rows: int, tree: DraftTree) -> None:
        """Follow what steps bring; lookahead that does not reach plain decoding's rate is left alone for a while."""
        again = self._echo.heard(new)
        if self.idle:  # a step that guessed nothing, or caught up with what other ranks had
            self._nap_on(again)
            return
        seconds = self.curve.step_s(rows)
        self._rate.add(len(new), seconds)
        self._accepted.add(len(new) - 1, 1)
        expected, came = tree.foretold(new)
        self._truth.add(*((came, expected / self._believed) if len(tree) else (DRIFT, DRIFT)))
        self._run = max(len(new) - 1, FADE * self._run)
        self._beside.add(self._worths(tree.accept_probs), 1)
        self._awake.add(len(new), seconds)
        self._brought.add(len(new) - 1, 1)
        self._trial -= 1
        pays = self._awake.ratio >= max(LEAST - self._brought.ratio / 2, BEARABLE) / self.curve.plain_s
        if self._trial <= 0 and not pays:
            self._doze()
            return
        if self._trial <= -TRIAL:
            self._nap, self._woken = SHORTEST_NAP, False
        self.columns = self._columns()

    def _doze(self) -> None:
        self.idle, self._left, self.columns, self._deaf = True, self._nap, 0, self._woken
        self._nap = min(2 * self._nap, self._longest)

    def _nap_on(self, again: bool) -> None:
        self._left -= 1
        heard = again and not self._deaf
        if heard or not self._left:
            self._woken, self.idle, self._trial, self._awake = heard, False, RETRIAL, _Running(0.0, 0.0, 2 * TRIAL)

    def _window(self, columns: int) -> int:
        """Rows of a window of so many columns, `c` included."""
        return max(columns, 1) + columns * (self.config.ngram_size - 2)

    def _worths(self, accept_probs: Sequence[float]) -> np.ndarray:
        """Tokens that as many candidates as pay are worth beside each window, less what its rows and theirs cost."""
        rows = np.minimum(self._windows[:, None] + np.arange(len(accept_probs) + 1), len(self._costs) - 1)
        return (np.cumsum([0.0, *accept_probs]) - CAUTION * self.rate * self._costs[rows]).max(1)

    def _columns(self) -> int:
        """What raises S by more than the columns' rows cost."""
        gains = (self._accepted.ratio + 1) * self._gains
        return self._ladder[int((self._beside.ratio + gains).argmax())]
