"""Back-off: while lookahead does not pay, steps are plain (one token, no lookahead), with a new trial now and then."""

from __future__ import annotations

from collections.abc import Sequence

from lp.budget.running_ratio import RunningRatio

# All constants here were fitted on the demo model (docs/experiments/budget.md).
# Where a measurement is on record, it is named.

# Steps in which lookahead must show that it pays: at the start of a text, and after a back-off. They were 16 and 3
# before; fitted on HumanEval prompts at T = 2, where nothing is accepted and every tried step is lost.
FIRST_TRIAL_STEPS = 8
TRIAL_STEPS = 2
# How many of the last steps count when that is judged.
JUDGED_STEPS = 2 * FIRST_TRIAL_STEPS
# The share of plain decoding's rate that lookahead must reach if nothing is accepted. Half of the draft tokens
# accepted a step is taken off, because what the pool learns meanwhile pays later, but never below the second share.
# Fitted together with the repeat detector: 1.03 x on HumanEval at T = 0 and T = 0.8 and 1.05 x on MT-Bench at T = 0.8,
# against a share of 0.95 throughout and back-offs that end by their length alone.
RATE_WITHOUT_ACCEPTED = 0.95
LEAST_RATE = 0.8
# Plain steps of the first back-off, and of the longest; each is twice as long as the one before.
SHORTEST_BACK_OFF = 4
LONGEST_BACK_OFF = 64
# A text that is this many plain steps behind plain decoding takes plain steps only. No text may be more than 5 behind
# (docs/experiments/budget.md), and the step that crosses this bound may cost two of them.
MOST_BEHIND = 3.0
# After this many plain steps a text may lose one more: it may have changed meanwhile.
PLAIN_STEPS_PER_LOSS = 256
# At this temperature and above, if tokens are sampled from the whole vocabulary, nothing can be guessed until the text
# shows otherwise. The demo model accepts nothing at T = 2.
HIGH_TEMPERATURE = 1.5
# The first and the longest back-off of such a text. Fitted on HumanEval at T = 2, against plain decoding: at most 1.4 %
# slower in three measurements, where 64 steps were up to 2.1 % slower in four.
HIGH_TEMPERATURE_BACK_OFF = 128
# A run of so many tokens that the text had before ends a back-off at once, because loops begin this way. Fitted with
# the shares above.
REPEAT_TOKENS = 4


class RepeatDetector:
    """Notices when a text repeats a run of tokens: then drafts probably pay again, and a back-off may end.

    A back-off is a series of steps without lookahead. A run has REPEAT_TOKENS tokens.
    """

    def __init__(self) -> None:
        self._last: tuple[int, ...] = ()
        self._runs: set[tuple[int, ...]] = set()

    def add(self, new_tokens: Sequence[int]) -> bool:
        """Add new tokens of the text; returns whether the text's last REPEAT_TOKENS tokens have occurred in it before.

        Args:
            new_tokens: token ids to add.
        """
        repeats = False
        for token in new_tokens:
            self._last = (*self._last[1 - REPEAT_TOKENS :], token)
            repeats = self._last in self._runs
            self._runs.add(self._last)
        return repeats


class BackOff:
    """Decides for one text whether the next step uses lookahead or is plain, by how much lookahead has gained recently.

    A plain step generates one token without lookahead. Rates (tokens per second) are calculated from the table of step
    times, not measured by a clock.

    1. Trial: lookahead runs, and must reach a certain fraction of the rate of plain decoding.
    2. Back-off: if it does not, the next steps are plain, twice as many in each further back-off. A back-off ends early
       if the text repeats a run of tokens. But if the trial after such an early end fails, repeats do not end the next
       back-off, since some texts repeat runs all the time.
    3. Success: if lookahead pays for FIRST_TRIAL_STEPS steps beyond its trial, the next back-off is short again.

    If lookahead has cost a text the time of more than MOST_BEHIND plain steps, a back-off begins at once, and repeats
    do not end it. Every PLAIN_STEPS_PER_LOSS plain steps, the loss is lowered by one step.

    If n texts share steps, a trial of one text delays all of them. So trials are n times shorter and back-offs n times
    longer, up to the longest back-off.

    Args:
        temperature: sampling temperature if tokens are sampled from the whole vocabulary; 0 if sampling is greedy or
            restricted, for example by top-k.

    Attributes:
        idle: whether the next step is to be plain.
    """

    def __init__(self, temperature: float) -> None:
        self.idle = False
        self._repeats = RepeatDetector()
        self._rate = RunningRatio(0.0, 0.0, JUDGED_STEPS)  # tokens per time of a plain step, since this trial began
        self._accepted = RunningRatio(0.0, 0.0, JUDGED_STEPS)  # accepted draft tokens per step, plain steps left out
        self._trial_left = FIRST_TRIAL_STEPS  # steps; below 0 once it has passed
        self._plain_left = 0  # plain steps of this back-off
        self._next_back_off = SHORTEST_BACK_OFF
        self._longest_back_off = LONGEST_BACK_OFF
        self._resumed_by_repeat = False
        self._ignores_repeats = False
        self._behind = 0.0  # time lost against plain decoding, in plain steps; below 0 if time was gained
        if temperature >= HIGH_TEMPERATURE:
            self._next_back_off = HIGH_TEMPERATURE_BACK_OFF
            self._longest_back_off = HIGH_TEMPERATURE_BACK_OFF
            self._begin()

    def record_step(self, new_tokens: Sequence[int], plain_steps: float, texts: int = 1) -> None:
        """Judge lookahead by a step that used it; if it does not pay, a back-off (a series of plain steps) begins.

        Args:
            new_tokens: token ids that the step added to the text.
            plain_steps: time of the step, divided by the time of a plain step.
            texts: number of texts that shared the step.
        """
        self._repeats.add(new_tokens)
        self._rate.add(len(new_tokens), plain_steps)
        self._accepted.add(len(new_tokens) - 1, 1)
        self._trial_left -= texts
        share = max(RATE_WITHOUT_ACCEPTED - self._accepted.ratio / 2, LEAST_RATE)
        pays = self._rate.ratio >= share
        self._behind += plain_steps - len(new_tokens)
        if self._behind > MOST_BEHIND or (self._trial_left <= 0 and not pays):
            self._begin(texts)
        elif self._trial_left <= -FIRST_TRIAL_STEPS:
            self._next_back_off = SHORTEST_BACK_OFF
            self._resumed_by_repeat = False

    def record_plain_step(self, new_tokens: Sequence[int]) -> None:
        """Count a plain step (without lookahead) of a back-off; it may be the last one.

        Args:
            new_tokens: token ids that the step added to the text.
        """
        repeats = self._repeats.add(new_tokens) and not self._ignores_repeats
        self._plain_left -= 1
        self._behind -= 1 / PLAIN_STEPS_PER_LOSS
        if self._behind <= MOST_BEHIND and (repeats or self._plain_left <= 0):
            self.idle = False
            self._resumed_by_repeat = repeats
            self._trial_left = TRIAL_STEPS
            self._rate = RunningRatio(0.0, 0.0, JUDGED_STEPS)

    def _begin(self, texts: int = 1) -> None:
        self.idle = True
        self._ignores_repeats = self._resumed_by_repeat
        self._plain_left = min(texts * self._next_back_off, self._longest_back_off)
        self._next_back_off = min(2 * self._next_back_off, self._longest_back_off)
