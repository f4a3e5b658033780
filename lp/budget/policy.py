"""The token budget: how many window columns and draft tokens the next step gets; a fixed number, or as many as pay.

A text is generated fastest if every step maximises its generated tokens less rate * seconds, where rate is the number
of tokens per second in the steps around it. So a draft token pays as long as its accept probability exceeds rate * the
seconds that it adds to the step. All ranks decide from the same figures (probabilities, accepted tokens, rank 0's step
times), never by their own clocks.
"""

from __future__ import annotations

import sys
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

# Time is priced above its worth by this factor: draft tokens are chosen because they look likely, so they are less
# likely than they look, on average. Fitted on the demo model (docs/experiments/budget.md).
PRICE_MARGIN = 1.25

# The prompt's logits are read where tokens are nearly free, as on a GPU: where a step of this many tokens takes at most
# two plain steps. Elsewhere the LM head costs more time than they bring.
NEARLY_FREE_TOKENS = 64
# Number of the prompt's last tokens whose logits the adaptive budget then reads. The limit keeps their cost the same
# for all longer prompts.
PROMPT_LOGITS = 1024

Clock = Callable[[TimedStep], StepTimes | None]


@dataclass(frozen=True, slots=True)
class Company:
    """How one text shares decode steps with other texts, as far as its token budget has to know.

    Attributes:
        texts: number of texts that a step computes together, including this one.
        other_tokens: estimated number of step tokens on a rank that belong to the other texts.
        tokens_per_s: estimated generated tokens per second, of all texts together; 0: not known yet.
    """

    texts: int = 1
    other_tokens: int = 0
    tokens_per_s: float = 0.0


class Budget(Protocol):
    """Decides how much each step of one text computes; every rank has an instance, and all instances decide alike.

    Attributes:
        columns: number of columns of the lookahead window in the next step, on all ranks together.
        step_tokens: B, the most step tokens of a rank.
        ranks: R, number of ranks that share a step.
        prompt_logits: number of the prompt's last tokens whose logits the n-gram pool may learn from, if the settings
            have them computed; 0: none.
        max_padded_tokens: largest number that `padded_size` returns; 0 if steps are never padded.
        learns: whether the budget learns from steps; if not, `record_step` and `observe` need not be called.
        company: number and size of the texts that share the next step with this one; set before each step.
    """

    columns: int
    step_tokens: int
    ranks: int
    prompt_logits: int
    max_padded_tokens: int
    learns: bool
    company: Company

    @property
    def tokens_per_step(self) -> float:
        """Average number of tokens that each of the last steps generated for this text.

        If texts share steps, their averages are added up.
        """
        ...

    @property
    def idle(self) -> bool:
        """Whether the next step is plain: it has no window and no draft tokens, and nothing is learned from it."""
        ...

    def price(self, base_tokens: int, least_tokens: int) -> TokenPrice | None:
        """Return the price of draft tokens in the next step, on one rank; None: draft tokens cost nothing.

        Args:
            base_tokens: number of step tokens on this rank without draft tokens.
            least_tokens: largest such number of any rank, because all ranks wait for that rank; 0 if there is only one
                rank.
        """
        ...

    def padded_size(self, num_tokens: int) -> int:
        """How many tokens to compute in a step that needs `num_tokens`: more tokens if a larger step is faster."""
        ...

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from the measured time of a step on this rank; called only for steps that no other text shares.

        Args:
            num_tokens: number of tokens that the step needed, without padding; 0 for a plain step (no lookahead).
            seconds: duration of the step.
        """
        ...

    def record_step(self, new_tokens: Sequence[int], num_tokens: int, drafts: DraftRecord) -> None:
        """Learn from the result of a decode step, which is the same on every rank.

        Args:
            new_tokens: token ids that the step added to the text.
            num_tokens: number of step tokens, without padding, on the rank that had most.
            drafts: how many draft tokens were expected to be accepted, and how many were.
        """
        ...


class FixedBudget:
    """A budget of fixed shape: every step has W columns, and as many draft tokens as its fixed size leaves room for.

    Args:
        config: settings with W, N and G of a whole step, on all ranks together.
        ranks: number of ranks that divide the step among them.

    Raises:
        ValueError: one rank would have to compute more than MAX_STEP_TOKENS tokens.
    """

    idle = False
    prompt_logits = sys.maxsize
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
        """Return None: draft tokens cost nothing under a fixed budget."""
        return None

    def padded_size(self, num_tokens: int) -> int:
        """Return `num_tokens` unchanged: steps under a fixed budget are not padded."""
        return num_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Do nothing: a fixed budget does not depend on how long steps take."""

    def record_step(self, new_tokens: Sequence[int], num_tokens: int, drafts: DraftRecord) -> None:
        """Do nothing: a fixed budget does not learn from the results of steps."""


class AdaptiveBudget:
    """A budget that gives each step as many columns and draft tokens as pay, on this machine and in this text.

    It decides by step times, and by how many tokens the last steps accepted. Other files of this package contain its
    parts: a window policy, a calibration and a depth discount for accept probabilities, and a back-off to plain steps
    (steps of one token, without lookahead).

    Args:
        config: settings of the decoder; W and G are the most columns and draft tokens of one rank.
        step_times: table of the seconds that a step takes, by the number of tokens of a rank.
        ranks: R, number of ranks that share a step.
        temperature: sampling temperature if tokens are sampled from the whole vocabulary; 0 if sampling is greedy or
            restricted, for example by top-k.
        texts: most texts that may share a step.
        clock: function that is called with each timed step; returns new step times to use from now on, or None to keep
            the present ones. If `clock` itself is None, the step times never change.

    Attributes:
        company: number and size of the texts that share the next step with this one.
    """

    learns = True

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
        self.prompt_logits = PROMPT_LOGITS if _are_nearly_free(step_times) else 0
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
        """Use these step times from now on."""
        if self._texts > 1:
            step_times = extended(step_times, self._texts * self.step_tokens)
        self._step_times = step_times
        self._seconds = compiled_array(step_times.seconds_by_tokens)
        self._marginal_seconds = compiled_array(step_times.marginal_seconds)

    @property
    def idle(self) -> bool:
        """Whether the next step is plain (one token, no lookahead), because lookahead does not pay now."""
        return self._back_off.idle

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of all texts, in the last steps; at least the rate of decoding without lookahead.

        Seconds are taken from the table of step times, not from a clock.
        """
        rate = self._rate.ratio if self.company.texts == 1 else self.company.tokens_per_s
        return max(rate, 1 / self._plain_s)

    @property
    def tokens_per_step(self) -> float:
        """Average number of tokens that each of the last steps generated for this text."""
        return self._accepted.ratio + 1

    @property
    def _plain_s(self) -> float:
        """Seconds of a plain step of all texts, divided by their number."""
        times = self._step_times
        texts = self.company.texts
        return times.plain_s if texts == 1 else (times.plain_s + times.step_s(texts) - times.step_s(1)) / texts

    def _own_s(self, num_tokens: int) -> float:
        """Seconds of a step due to this text: its part of a plain step, its host work, and its further tokens."""
        times = self._step_times
        others = self.company.other_tokens
        if self.company.texts == 1:
            return times.step_s(others + num_tokens)
        return self._plain_s + times.own_work_s + times.step_s(others + num_tokens) - times.step_s(others + 1)

    def price(self, base_tokens: int, least_tokens: int) -> TokenPrice:
        """Return the price of draft tokens in the next step, on one rank.

        While one rank computes one more token, each of the R ranks can compute one. So each token is charged 1 / R of
        the time.

        Args:
            base_tokens: number of step tokens on this rank without draft tokens.
            least_tokens: largest such number of any rank, because all ranks wait for that rank; 0 if there is only one
                rank.
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
        """Step tokens that other texts take, bounded so that the step times cover this text's tokens beyond them."""
        return max(min(self.company.other_tokens, self._step_times.max_tokens - self.step_tokens), 0)

    def padded_size(self, num_tokens: int) -> int:
        """How many tokens to compute in a step that needs `num_tokens`: more tokens if a larger step is faster."""
        return self._step_times.padded_size(num_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Report a step's time to the clock, and use the step times that it returns if they differ enough to matter.

        The clock is the function that was given to the constructor.

        Args:
            num_tokens: number of tokens that the step needed, without padding; 0 for a plain step (no lookahead).
            seconds: duration of the step.
        """
        if self._clock is None:
            return
        computed = self.padded_size(num_tokens) if num_tokens else 0
        if found := self._clock(TimedStep(computed, seconds)):
            found = scaled(found, self._step_times.plain_s)  # the rate so far is in seconds of these
            if differ(found, self._step_times):
                self._take(found)
                self._window.take(self._step_times)

    def record_step(self, new_tokens: Sequence[int], num_tokens: int, drafts: DraftRecord) -> None:
        """Learn from the result of a decode step; if lookahead does not pay, the next steps are plain (one token each).

        Args:
            new_tokens: token ids that the step added to the text.
            num_tokens: number of step tokens, without padding, on the rank that had most.
            drafts: how many draft tokens were expected to be accepted, and how many were.
        """
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
        """Generated tokens that each further second of a step must bring to be worth it."""
        return PRICE_MARGIN * self.tokens_per_s

    def _next_columns(self) -> int:
        return 0 if self.idle else self._window.columns(self._accepted.ratio + 1)


def _are_nearly_free(step_times: StepTimes) -> bool:
    """Whether each further token of a step takes at most a 64th of a plain step, up to 64 tokens or the table's end."""
    num_tokens = min(NEARLY_FREE_TOKENS, step_times.max_tokens)
    return step_times.step_s(num_tokens) <= (1 + num_tokens / NEARLY_FREE_TOKENS) * step_times.plain_s
