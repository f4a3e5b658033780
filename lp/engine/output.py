"""What a `generate` call returns, and what each of its steps took."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class StepTimer:
    """Splits time: `lap()` returns the seconds since the last lap and adds them to a name's share."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.shares: dict[str, float] = {}

    def lap(self, name: str = "") -> float:
        now = time.perf_counter()
        took, self.last = now - self.last, now
        self.shares[name] = self.shares.get(name, 0.0) + took
        return took


class StepStats(NamedTuple):
    """One decode step on this rank.

    Attributes:
        num_tokens: tokens this rank computed.
        num_draft: draft tokens of the whole step, beyond the window's.
        accepted: accepted tokens, without the bonus.
        forward_s, exchange_s, host_s: seconds in the model, in the collectives, and in everything else.
        learn_s: of host_s, what the candidate source and the window took to learn from the step.
        columns: of the window.
        idle: nothing was guessed and nothing learned: the budget left the step plain.
    """

    num_tokens: int
    num_draft: int
    accepted: int
    forward_s: float
    exchange_s: float
    host_s: float
    learn_s: float = 0.0
    columns: int = 0
    idle: bool = False

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.forward_s + self.exchange_s + self.host_s

    @classmethod
    def of(
        cls, clock: StepTimer, num_tokens: int, num_draft: int, accepted: int, columns: int, idle: bool
    ) -> StepStats:
        """The stats of a step whose laps were named forward, exchange, host and learn."""
        share = clock.shares.get
        forward_s, exchange_s, learn_s = share("forward", 0.0), share("exchange", 0.0), share("learn", 0.0)
        host_s = share("host", 0.0) + learn_s
        return cls(num_tokens, num_draft, accepted, forward_s, exchange_s, host_s, learn_s, columns, idle)


@dataclass
class GenerationOutput:
    """What one `generate` call gave.

    Attributes:
        tokens: the new tokens, EOS included when it ended there.
        finish_reason: "eos", "length", "stop_string", "criteria" or "context"; "interrupted" in `Interrupted.output`.
        step_stats: one entry a decode step.
        prefill_s, decode_s: seconds before the first decode step, and from there on.
        cache_bytes: bytes of the preallocated KV cache (0 where the decoder has none).
        logits, scores: (tokens, V), of the rows that chose the tokens, if asked for.
        resumed: first tokens that no step of this call made: a journal had them.
    """

    tokens: list[int]
    finish_reason: str
    step_stats: list[StepStats] = field(repr=False)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cache_bytes: int = 0
    logits: torch.Tensor | None = field(default=None, repr=False)
    scores: torch.Tensor | None = field(default=None, repr=False)
    resumed: int = 0

    @property
    def steps(self) -> int:
        """Decode steps."""
        return len(self.step_stats)

    @property
    def compression(self) -> float:
        """S: generated tokens a decode step."""
        return (len(self.tokens) - self.resumed) / self.steps if self.steps else 0.0

    @property
    def mean_tokens(self) -> float:
        """Mean rows a step on this rank."""
        return statistics.fmean(s.num_tokens for s in self.step_stats) if self.step_stats else 0.0
