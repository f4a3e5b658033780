"""The token budget: how many columns and draft tokens the next step gets, always the same or as many as pay.

A text takes least time if every step maximises its tokens less rate x seconds, where rate is the tokens a second of the
steps around it: a draft token pays while its accept probability exceeds rate x the seconds that it costs.
Every rank decides from the same figures (probabilities, accepted tokens, rank 0's step times), never by its own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lp.budget.backoff import BackOff
from lp.budget.calibration import EXPLORATION_TOKENS, Calibration, DepthDiscount, DraftRecord, exploration_bonus
from lp.budget.observed_times import TimedStep
from lp.budget.running_ratio import MEMORY_STEPS, PRIOR_STEPS, RunningRatio
from lp.budget.step_times import StepTimes, differ, extended, scaled
from lp.budget.window_policy import WindowPolicy
from lp.compiled import compiled_array
from lp.config import MAX_STEP_TOKENS, LookaheadConfig
from lp.draft.share import step_tokens
from lp.draft.source import TokenPrice
from lp.errors import UserError

# Time is priced above its worth by this factor: of all draft tokens those are taken that look best, and they are less
# likely than they look. Fitted on the demo model (docs/experiments/budget.md).
PRICE_MARGIN = 1.25

Clock = Callable[[TimedStep], StepTimes | None]


@dataclass(frozen=True, slots=True)
class Company:
    """The texts that a step computes together.

    Attributes:
        texts: how many.
        other_tokens: step tokens of a rank that the others take, about.
        tokens_per_s: tokens a second that all of the texts gain, about; 0 where nothing is known yet.
    """

    texts: int = 1
    other_tokens: int = 0
    tokens_per_s: float = 0.0


class Budget(Protocol):
    """Decides what the next step computes, alike on every rank.

    Attributes:
        columns: columns of the lookahead window, on all ranks together.
        step_tokens: B, the most step tokens of a rank.
        ranks: how many ranks share a step.
        uses_prompt_logits: the pool may learn from the prompt's logits, if the config has it so.
        max_padded_tokens: the most tokens that `padded_size` may raise a step to; 0 if it never pads.
        learns: `record_step` is to be called.
    """

    columns: int
    step_tokens: int
    ranks: int
    uses_prompt_logits: bool
    max_padded_tokens: int
    learns: bool
    company: Company

    @property
    def tokens_per_step(self) -> float:
        """How many tokens each of the last steps gained, about."""
        ...

    @property
    def idle(self) -> bool:
        """The next step is plain: it guesses nothing and learns nothing."""
        ...

    def price(self, base_tokens: int, least_tokens: int) -> TokenPrice | None:
        """What the next step's draft tokens cost a rank; None: nothing.

        Args:
            base_tokens, least_tokens: see `TokenPrice`.
        """
        ...

    def padded_size(self, num_tokens: int) -> int:
        """How many tokens this rank should compute in a step of `num_tokens`, which may be more if that is faster."""
        ...

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step took on this rank that computed nothing else than this text.

        Args:
            num_tokens: computed, without padding; 0 of a plain step.
            seconds: how long the step took.
        """
        ...

    def record_step(self, new_tokens: Sequence[int], num_tokens: int, drafts: DraftRecord) -> None:
        """Learn from a step.

        Args:
            new_tokens: the tokens that it added to the text.
            num_tokens: step tokens of the largest rank, without padding.
            drafts: what became of its draft tokens.
        """
        ...


class FixedBudget:
    """W columns, and as many draft tokens as B leaves room for, which cost nothing.

    Args:
        config: W, N and G, of the whole step.
        ranks: how many ranks divide them.

    Raises:
        ValueError: a rank's part is more than a step can have.
    """

    idle = False
    uses_prompt_logits = True
    max_padded_tokens = 0
    learns = False
    tokens_per_step = 1.0

    def __init__(self, config: LookaheadConfig, ranks: int = 1) -> None:
        self.company = Company()
        self.ranks = ranks
        self.columns = config.window_size
        self.step_tokens = step_tokens(config, ranks)
        if self.step_tokens > MAX_STEP_TOKENS:
            shape = f"W={config.window_size}, N={config.ngram_size}, G={config.guess_set_size}"
            raise UserError(
                f"a step of {shape} on {ranks} rank(s) has {self.step_tokens} tokens a rank, more than "
                f"{MAX_STEP_TOKENS}; lower one of them or add ranks"
            )

    def price(self, base_tokens: int, least_tokens: int) -> TokenPrice | None:
        """None: tokens cost nothing under a fixed budget."""
        return None

    def padded_size(self, num_tokens: int) -> int:
        """The number as it is: steps of a fixed budget are not padded."""
        return num_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Do nothing: time decides nothing under a fixed budget."""

    def record_step(self, new_tokens: Sequence[int], num_tokens: int, drafts: DraftRecord) -> None:
        """Do nothing: a fixed budget learns nothing."""


class AdaptiveBudget:
    """What pays on this machine and in this text, by the step times and by what the last steps accepted.

    It is made of the parts that this package's other files hold: a window policy, a calibration and a depth discount of
    accept probabilities, and a back-off.

    Args:
        config: the shape of steps; its W and G are bounds, for one rank.
        step_times: seconds of a step, by the tokens of a rank.
        ranks: how many ranks share a step.
        temperature: temperature of sampling from the whole vocabulary, 0 if there is none.
        texts: most texts that a step may compute together.
        clock: told how long steps took; gives the step times by which the text goes on, or None.

    Attributes:
        company: the texts that take the next step.
    """

    learns = True
    uses_prompt_logits = False  # they cost a pass through the LM head for every token, more than they bring

    def __init__(
        self,
        config: LookaheadConfig,
        step_times: StepTimes,
        ranks: int = 1,
        temperature: float = 0.0,
        texts: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock
        self._texts = texts
        self.step_tokens = min(step_tokens(config), step_times.max_tokens)
        self.max_padded_tokens = step_times.max_tokens
        self.company = Company()
        self.ranks = ranks
        self._take(step_times)
        step_times = self._step_times
        self._rate = RunningRatio(PRIOR_STEPS, PRIOR_STEPS * step_times.plain_s, MEMORY_STEPS)
        self._accepted = RunningRatio(PRIOR_STEPS, PRIOR_STEPS, MEMORY_STEPS)  # draft tokens a step
        self._calibration = Calibration()
        self._depth_discount = DepthDiscount()
        self._window = WindowPolicy(config, step_times, self._price_per_s, ranks)
        self._back_off = BackOff(temperature)
        self.columns = self._next_columns()

    def _take(self, step_times: StepTimes) -> None:
        """Decide by these step times from now on."""
        if self._texts > 1:
            step_times = extended(step_times, self._texts * self.step_tokens)
        self._step_times = step_times
        self._seconds = compiled_array(step_times.seconds_by_tokens)
        self._marginal_seconds = compiled_array(step_times.marginal_seconds)

    @property
    def idle(self) -> bool:
        """Whether the next step is plain, because lookahead does not pay now."""
        return self._back_off.idle

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the last steps, by the step times, of all texts together; at least plain decoding's."""
        rate = self._rate.ratio if self.company.texts == 1 else self.company.tokens_per_s
        return max(rate, 1 / self._plain_s)

    @property
    def tokens_per_step(self) -> float:
        """How many tokens each of the last steps gained, about."""
        return self._accepted.ratio + 1

    @property
    def _plain_s(self) -> float:
        """What a plain step of all texts takes, divided by their number."""
        times = self._step_times
        texts = self.company.texts
        return times.plain_s if texts == 1 else (times.plain_s + times.step_s(texts) - times.step_s(1)) / texts

    def _own_s(self, num_tokens: int) -> float:
        """What a step costs this text: its part of a plain step, its own host's work, and its other tokens."""
        times = self._step_times
        others = self.company.other_tokens
        if self.company.texts == 1:
            return times.step_s(others + num_tokens)
        return self._plain_s + times.own_work_s + times.step_s(others + num_tokens) - times.step_s(others + 1)

    def price(self, base_tokens: int, least_tokens: int) -> TokenPrice:
        """What the next step's draft tokens cost a rank.

        While one rank computes one token more, all of them may: a second is shared by R tokens.
        """
        others = self._other_tokens
        return TokenPrice(
            tokens_per_s=self._price_per_s / self.ranks,
            base_tokens=base_tokens + others,
            seconds=self._seconds,
            marginal_seconds=self._marginal_seconds,
            exploration_bonus=exploration_bonus(self._accepted.ratio),
            exploration_tokens=EXPLORATION_TOKENS,
            calibration=self._calibration.factor,
            depth_discount=self._depth_discount.per_token,
            least_tokens=least_tokens + others if least_tokens else 0,
        )

    @property
    def _other_tokens(self) -> int:
        """Tokens that other texts have in the step, as far as step times are known behind them."""
        return max(min(self.company.other_tokens, self._step_times.max_tokens - self.step_tokens), 0)

    def padded_size(self, num_tokens: int) -> int:
        """More tokens where a larger step is faster."""
        return self._step_times.padded_size(num_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Go on by other step times, if the clock now has some that differ."""
        if self._clock is None:
            return
        computed = self.padded_size(num_tokens) if num_tokens else 0
        if found := self._clock(TimedStep(computed, seconds)):
            found = scaled(found, self._step_times.plain_s)  # the rate so far is in seconds of these
            if differ(found, self._step_times):
                self._take(found)
                self._window.take(self._step_times)

    def record_step(self, new_tokens: Sequence[int], num_tokens: int, drafts: DraftRecord) -> None:
        """Learn from a step; if lookahead does not reach plain decoding's rate, the next ones are plain."""
        if self.idle:  # the step guessed nothing, though it may have caught up with what other ranks computed
            self._back_off.record_plain_step(new_tokens)
            return
        seconds = self._own_s(num_tokens)
        num_accepted = len(new_tokens) - 1
        self._rate.add(len(new_tokens), seconds)
        self._accepted.add(num_accepted, 1)
        self._calibration.record_step(drafts)
        self._depth_discount.record_step(num_accepted)
        self._window.record_step(drafts.accept_probs, self._price_per_s, self._other_tokens)
        self._back_off.record_step(new_tokens, seconds / self._plain_s, self.company.texts)
        self.columns = self._next_columns()

    @property
    def _price_per_s(self) -> float:
        """Tokens that each further second of a step must bring, to be worth it."""
        return PRICE_MARGIN * self.tokens_per_s

    def _next_columns(self) -> int:
        return 0 if self.idle else self._window.columns(self._accepted.ratio + 1)
