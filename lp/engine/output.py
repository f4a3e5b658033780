"""What a `generate` call returns, and what each of its steps took."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lp.models.clock import thread_clock

THREAD_CLOCK = thread_clock()


class _Part:
    """Adds up the time spent inside it, as in `with timer.forward:`."""

    __slots__ = ("_entered", "total_s")

    def __init__(self) -> None:
        self.total_s = 0.0

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.total_s += time.perf_counter() - self._entered


class StepTimer:
    """Splits the time of a step: in the model, in collectives, and on the host, which is all that is left.

    Attributes:
        forward, exchange: entered around the model and around the collectives.
        callback: entered around the user's own code, whose time is not the step's.
    """

    def __init__(self) -> None:
        self.forward, self.exchange, self.callback = _Part(), _Part(), _Part()
        self._started = time.perf_counter()
        self._thread_started = THREAD_CLOCK()

    def restart(self) -> float:
        """Seconds since the start or the last restart; the parts begin anew."""
        now = time.perf_counter()
        elapsed_s = now - self._started
        self._started = now
        self._thread_started = THREAD_CLOCK()
        self.forward.total_s = self.exchange.total_s = self.callback.total_s = 0.0
        return elapsed_s

    def thread_s(self) -> float:
        """Seconds of this thread's processor since the start or the last restart."""
        return THREAD_CLOCK() - self._thread_started

    def count_as_exchange(self, seconds: float) -> None:
        """Count seconds in the model as the exchange's: a GPU's queue holds both, and the host waits once."""
        self.forward.total_s -= seconds
        self.exchange.total_s += seconds

    def seconds(self) -> tuple[float, float, float]:
        """Seconds of the step so far: in the model, in collectives, and on the host."""
        forward_s, exchange_s = self.forward.total_s, self.exchange.total_s
        host_s = time.perf_counter() - self._started - forward_s - exchange_s - self.callback.total_s
        return forward_s, exchange_s, host_s


class StepStats(NamedTuple):
    """One decode step on this rank.

    Attributes:
        num_tokens: tokens this rank computed.
        num_draft: draft tokens of the whole step, beyond the window's.
        accepted: accepted tokens, without the bonus.
        forward_s, exchange_s, host_s: seconds in the model, in the collectives, and in everything else but the caller's
            own `on_tokens` and criteria.
        columns: columns of the lookahead window.
        idle: the token budget left the step plain: nothing was drafted, nothing learned.
        most_tokens: most tokens that some rank computed; without padding, like `num_tokens`.
    """

    num_tokens: int
    num_draft: int
    accepted: int
    forward_s: float
    exchange_s: float
    host_s: float
    columns: int = 0
    idle: bool = False
    most_tokens: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward_s + self.exchange_s + self.host_s


@dataclass
class GenerationOutput:
    """What one `generate` call gave.

    Attributes:
        tokens: the new tokens, EOS included when it ended there.
        finish_reason: "eos", "length", "stop_string", "criteria" or "context"; "interrupted" in `Interrupted.output`;
            "cancelled" of a text of an engine.
        step_stats: one entry a decode step.
        prefill_s, decode_s: seconds before the first decode step, and from there on.
        cache_bytes: bytes of the preallocated KV cache (0 where the decoder has none).
        logits, scores: (tokens, V), that the tokens were sampled from, if asked for.
        resumed: first tokens that no step of this call made: a journal had them.
        reused: tokens of the prompt that were cached before, of an earlier text.
        accepted_prediction: tokens of the caller's prediction that were accepted as draft tokens.
        attention: what computed it, such as "flash", the backend that `auto` took, or "transformers' sdpa" of plain
            decoding; empty where nothing was computed.
        exact: "bitwise" where the logits are bit for bit those of plain decoding in that mode, else "tokens".
        threads: how many CPU threads computed the text, to repeat it bit for bit with as many; 0 on another device.
        seed: seed that the text was sampled with, given or drawn; None for a greedy text.
    """

    tokens: list[int]
    finish_reason: str
    step_stats: list[StepStats] = field(repr=False)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cache_bytes: int = 0
    logits: torch.Tensor | None = field(default=None, repr=False, compare=False)
    scores: torch.Tensor | None = field(default=None, repr=False, compare=False)
    resumed: int = 0
    reused: int = 0
    accepted_prediction: int = 0
    attention: str = ""
    exact: str = "tokens"
    threads: int = 0
    seed: int | None = None

    @property
    def steps(self) -> int:
        """Number of decode steps."""
        return len(self.step_stats)

    @property
    def could_go_on(self) -> bool:
        """Whether it was cut short from outside."""
        return self.finish_reason in ("interrupted", "cancelled")

    @property
    def compression(self) -> float:
        """S: generated tokens a decode step."""
        return (len(self.tokens) - self.resumed) / self.steps if self.steps else 0.0

    @property
    def mean_tokens(self) -> float:
        """Mean step tokens of this rank."""
        return statistics.fmean(s.num_tokens for s in self.step_stats) if self.step_stats else 0.0
