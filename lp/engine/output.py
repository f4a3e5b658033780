"""The result of a `generate` call, with statistics and times of its decode steps."""

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
    """Measures how a decode step's time divides into the model, the collectives, and host work, which is the rest.

    Attributes:
        forward, exchange: context managers to enter around the model and around the collectives.
        callback: context manager to enter around the user's own code, whose time is left out of the step's.
    """

    def __init__(self) -> None:
        self.forward, self.exchange, self.callback = _Part(), _Part(), _Part()
        self._started = time.perf_counter()
        self._thread_started = THREAD_CLOCK()

    def restart(self) -> float:
        """Set all times back to 0 for the next step, and return the seconds since the start or the last restart."""
        now = time.perf_counter()
        elapsed_s = now - self._started
        self._started = now
        self._thread_started = THREAD_CLOCK()
        self.forward.total_s = self.exchange.total_s = self.callback.total_s = 0.0
        return elapsed_s

    def thread_s(self) -> float:
        """CPU seconds that this thread has used since the last restart; other programs do not lengthen them."""
        return THREAD_CLOCK() - self._thread_started

    def count_as_exchange(self, seconds: float) -> None:
        """Move seconds from the model's time to the collectives' time.

        On a GPU both run in one queue, and the host waits for that queue only once, within `forward`.

        Args:
            seconds: how long the collectives took.
        """
        self.forward.total_s -= seconds
        self.exchange.total_s += seconds

    def seconds(self) -> tuple[float, float, float]:
        """Seconds of the current step so far, without callbacks: (in the model, in collectives, on the host)."""
        forward_s, exchange_s = self.forward.total_s, self.exchange.total_s
        host_s = time.perf_counter() - self._started - forward_s - exchange_s - self.callback.total_s
        return forward_s, exchange_s, host_s


class StepStats(NamedTuple):
    """Statistics of one decode step on this rank, in `GenerationOutput.step_stats`.

    Attributes:
        num_tokens: tokens that this rank computed, without padding.
        num_draft: draft tokens of the step on all ranks together, without those that repeat window nodes.
        accepted: accepted draft tokens and window guesses; the step adds one token more to the text, the bonus token.
        forward_s, exchange_s, host_s: seconds in the model, in the collectives, and in all else; the caller's own
            `on_tokens` and criteria do not count.
        columns: columns of the lookahead window, on all ranks together.
        idle: whether the token budget made this a plain step (one token, no drafts), because lookahead did not pay.
        most_tokens: tokens that were computed by the rank with most of them, without padding.
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
        """Seconds of the whole step, the caller's own code left out."""
        return self.forward_s + self.exchange_s + self.host_s


@dataclass
class GenerationOutput:
    """The result of one `generate` call: the tokens, why they ended, and what it took to make them.

    Attributes:
        tokens: ids of the generated tokens, with the EOS if there is one.
        finish_reason: "eos", "length" (max_new_tokens), "stop_string", "criteria" or "context" (the model's context is
            full); "interrupted" in `Interrupted.output`; "cancelled" by `Engine.cancel`.
        step_stats: statistics, one entry for each decode step.
        prefill_s, decode_s: seconds before the first decode step, and seconds from then on.
        cache_bytes: bytes of the preallocated KV cache; 0 if the decoder has none.
        logits, scores: (tokens, V), the model's logits at each token, and the logits after processors and warpers that
            the token was chosen by; None unless asked for. V: vocabulary.
        resumed: how many of the first tokens came from a journal, so that no step of this call made them.
        reused: how many of the prompt's first tokens had their KV copied from an earlier request.
        accepted_prediction: how many tokens of the caller's `prediction` were accepted as draft tokens.
        attention: attention implementation that was used, such as "flash", or "transformers' sdpa" for
            AutoregressiveDecoder; empty if nothing was computed.
        exact: "bitwise" if the logits are bit for bit those of plain decoding in that mode, else "tokens".
        threads: number of CPU threads that computed the text, since rounding depends on it; 0 on another device.
        seed: seed that repeats a sampled text, whether given or drawn; None for a greedy text.
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
        """Whether generation was cut short from outside (interrupted or cancelled), so that it could be continued."""
        return self.finish_reason in ("interrupted", "cancelled")

    @property
    def compression(self) -> float:
        """The step compression S: mean number of generated tokens per decode step, such as 2.4; plain decoding: 1."""
        return (len(self.tokens) - self.resumed) / self.steps if self.steps else 0.0

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens that this rank computed per step, without padding."""
        return statistics.fmean(s.num_tokens for s in self.step_stats) if self.step_stats else 0.0
