"""The token budget: how many window columns and draft tokens the next step gets; a fixed number, or as many as pay.

A text takes least time if every step maximises its tokens less rate x seconds, where rate is the tokens per second of
the steps around it: a draft token pays while its accept probability exceeds rate x the seconds that it costs.
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

# Time is priced above its worth by this factor: draft tokens are chosen because they look likely, so they are less
# likely than they look, on average. Fitted on the demo model (docs/experiments/budget.md).
PRICE_MARGIN = 1.25

Clock = Callable[[TimedStep], StepTimes | None]


@dataclass(frozen=True, slots=True)
class Company:
    """How one text shares steps with others: what its budget needs to know about them.

    Attributes:
        texts: number of texts that a step computes together, this one included.
        other_tokens: estimated step tokens of a rank that the other texts take.
        tokens_per_s: estimated generated tokens per second of all texts together; 0: not known yet.
    """

    texts: int = 1
    other_tokens: int = 0
    tokens_per_s: float = 0.0


class Budget(Protocol):
    """Decides how much each step of one text computes; every rank has one and all decide alike.

    Attributes:
        columns: number of columns of the lookahead window in the next step, on all ranks together.
        step_tokens: B, the most step tokens of a rank.
        ranks: R, number of ranks that share a step.
        uses_prompt_logits: whether the pool may learn from the prompt's logits, if the config has them computed.
        max_padded_tokens: most tokens that `padded_size` returns; 0 if steps are never padded.
        learns: whether the budget learns: if not, `record_step` and `observe` need not be called.
        company: the texts that share the next step with this one; set before each step.
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
        """Average number of tokens that the last steps generated for this text; texts that share steps sum it up."""
        ...

    @property
    def idle(self) -> bool:
        """Whether the next step is plain: without window and draft tokens, and nothing is learned from it."""
        ...

    def price(self, base_tokens: int, least_tokens: int) -> TokenPrice | None:
        """The price of draft tokens in the next step, on one rank; None: they cost nothing.

        Args:
            base_tokens: step tokens of the rank without draft tokens.
            least_tokens: most such tokens of any rank, for which the others wait; 0 if there is no other rank.
        """
        ...

    def padded_size(self, num_tokens: int) -> int:
        """How many tokens to compute in a step that needs `num_tokens`: more, where a larger step is faster."""
        ...

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from the measured time of a step on this rank; called only for steps of this text alone.

        Args:
            num_tokens: tokens that the step needed, without padding; 0 for a plain step.
            seconds: seconds that the step took.
        """
        ...

    def record_step(self, new_tokens: Sequence[int], num_tokens: int, drafts: DraftRecord) -> None:
        """Learn from the result of a step, which is the same on every rank.

        Args:
            new_tokens: token ids that the step added to the text.
            num_tokens: most step tokens of any rank, without padding.
            drafts: what became of the step's draft tokens.
        """
        ...


class FixedBudget:
    """The budget of a fixed shape: every step has W columns, and as many draft tokens as its size leaves room for.

    Args:
        config: W, N and G of a whole step.
        ranks: number of ranks that divide the step among them.

    Raises:
        ValueError: a rank's part has more tokens than MAX_STEP_TOKENS.
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
        """Return None: draft tokens cost nothing under a fixed budget."""
        return None

    def padded_size(self, num_tokens: int) -> int:
        """Return the number as it is: steps of a fixed budget are not padded."""
        return num_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Do nothing: a fixed budget does not depend on time."""

    def record_step(self, new_tokens: Sequence[int], num_tokens: int, drafts: DraftRecord) -> None:
        """Do nothing: a fixed budget learns nothing."""


class AdaptiveBudget:
    """The budget that gives each step as many columns and draft tokens as pay on this machine and in this text.

    It decides by step times and by what the last steps accepted, with the parts in this package's other files: a window
    policy, a calibration and a depth discount of accept probabilities, and a back-off to plain steps.

    Args:
        config: settings of the decoder; W and G are the most columns and draft tokens of one rank.
        step_times: seconds of a step by the number of tokens of a rank.
        ranks: R, number of ranks that share a step.
        temperature: temperature at which tokens are sampled from the whole vocabulary; 0 if the sampler narrows it, or
            is greedy.
        texts: most texts that may share a step.
        clock: called with each timed step; returns new step times to use, or None to keep the present ones. None: the
            step times never change.

    Attributes:
        company: the texts that share the next step with this one.
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
        """Use these step times from now on."""
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
        """Generated tokens per second in the last steps, by the step times, of all texts; at least plain decoding's."""
        rate = self._rate.ratio if self.company.texts == 1 else self.company.tokens_per_s
        return max(rate, 1 / self._plain_s)

    @property
    def tokens_per_step(self) -> float:
        """Average number of tokens that the last steps generated."""
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
        """The price of draft tokens in the next step, on one rank.

        In the time in which one rank computes one more token, all R ranks can: so each pays 1 / R of the time.

        Args:
            base_tokens: step tokens of the rank without draft tokens.
            least_tokens: most such tokens of any rank, for which the others wait; 0 if there is no other rank.
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
        """How many tokens to compute in a step that needs `num_tokens`: more where a larger step is faster."""
        return self._step_times.padded_size(num_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Tell the clock how long a step took, and use the step times that it returns if they differ by enough.

        Args:
            num_tokens: tokens that the step needed, without padding; 0 for a plain step.
            seconds: seconds that the step took.
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
        """Learn from the result of a step; if lookahead does not pay, the next steps are plain. (Args: see Budget.)"""
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
