"""The engine: generates for requests that are submitted at any time, several in every step (continuous batching).

    engine = lp.Engine(decoder)
    one, other = engine.submit(ids, 100), engine.submit(more_ids, 50, lp.SamplingParams(seed=7))
    engine.run()                                   # or engine.step() until it returns False
    one.result().tokens, other.result().tokens

A request becomes a sequence: its prompt and the tokens that are generated after it; the code calls it a text. First
come, first served: a request waits until fewer than `max_sequences` sequences run, and until as many cache slots are
free as it may need. Prompts are prefilled in chunks, in the steps that the other sequences take anyway. A request gets
the tokens that it would get alone, whatever else runs; a sampled request does so for a given seed.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from lp.checks import check_int, check_switch
from lp.engine.core import EngineCore, Handle
from lp.engine.inputs import Prompt
from lp.engine.interrupts import DeferredSignals, SignalsOfSteps, interruption
from lp.engine.memory import remedy_named
from lp.engine.step_decoder import StepDecoder
from lp.errors import UserError
from lp.models.captured_forests import CapturedForests, captures_forests, pool_for
from lp.models.kv_cache import CacheTooLarge, slot_bytes
from lp.models.loader import context_limit
from lp.models.memory import format_bytes, free_bytes
from lp.parallel.agreement import check_same, exchange
from lp.parallel.message import Stop
from lp.sampling.params import SamplingParams

MAX_SEQUENCES = 8  # default of max_sequences
MOST_SEQUENCES = 1 << 16  # the largest max_sequences that is accepted
PREFILL_CHUNK = 128  # default of prefill_chunk, tokens
CACHE_SHARE = 0.5  # share of the free memory that the cache takes by default
LONGEST_TEXT = 32768  # cache slots for each sequence by default, if the model's context is longer


class Engine:
    """Generates for many requests at a time: `submit` them whenever they come, and call `step` until it returns False.

    All calls come from one thread: other threads hand their requests to it, and wake it after `step` has returned
    False. Callbacks may submit and cancel. If there are several ranks, all make the same calls in the same order. Use
    the engine as a context manager: at the end of the block it cancels requests that have not ended, and frees its
    memory. After an exception from `step` or `run` the engine can't be used again, except after the KeyboardInterrupt
    of a signal.

    Args:
        decoder: a LookaheadDecoder or PlainDecoder, which computes the steps.
        max_sequences: most requests that generate at a time; the others wait.
        cache_tokens: number of KV cache slots for all requests together, one for each token. None: enough for
            `max_sequences` + 1 requests of full length, but no more than half of the free memory holds.
        prefill_chunk: most prompt tokens that a step prefills while other requests decode in it; a low number keeps
            these steps short.
        reuse_prefixes: keep the KV of ended requests, so that a later prompt that begins with the same tokens is not
            computed from its start.

    Attributes:
        signal: number of the signal that ended the last `run`; 0 if this rank got none.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        decoder: StepDecoder,
        max_sequences: int = MAX_SEQUENCES,
        cache_tokens: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        reuse_prefixes: bool = True,
    ) -> None:
        if not isinstance(decoder, StepDecoder):
            raise UserError(f"{type(decoder).__name__} has no steps to share; give the engine a LookaheadDecoder")
        self.decoder = decoder
        self.max_sequences = check_int("max_sequences", max_sequences, 1, MOST_SEQUENCES, f"try {MAX_SEQUENCES}")
        self.prefill_chunk = check_int("prefill_chunk", prefill_chunk, 1, 2**63 - 1, f"try {PREFILL_CHUNK}")
        if cache_tokens is not None:
            check_int("cache_tokens", cache_tokens, 1, 2**40, "leave it out to take what the memory allows")
        reuse_prefixes = check_switch("reuse_prefixes", reuse_prefixes)
        runner = decoder.runner
        with remedy_named(), decoder.computing():
            runner.follow()
            capacity = cache_tokens or slots_within_memory(decoder, (self.max_sequences + 1) * longest_text(decoder))
            settings = {
                "max_sequences": self.max_sequences,
                "cache_tokens": capacity,
                "prefill_chunk": self.prefill_chunk,
                "reuse_prefixes": reuse_prefixes,
            }
            check_same(decoder.context.ranks, "making an Engine", settings)
            try:
                self.pool = pool_for(runner, capacity)
            except CacheTooLarge as error:
                raise _no_room(error, runner.device) from error
        self._signals = SignalsOfSteps()  # a signal that comes in here ends the running texts
        self._signals_of_step = DeferredSignals()  # one that comes in here is raised after the step; no text ends
        captures = captures_forests(runner, capacity)
        shared = CapturedForests(runner, self.pool, self.max_sequences) if captures else None
        self._core = EngineCore(
            decoder, self.pool, self.max_sequences, self.prefill_chunk, reuse_prefixes, self._signals, shared
        )
        self.signal = 0
        self._closed = False

    def submit(
        self,
        input_ids: Prompt,
        max_new_tokens: int = 256,
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> Handle:
        """Submit a request; it begins in one of the next steps, when there is room.

        Args:
            input_ids, max_new_tokens, sampling, options: see `Decoder.generate`. `on_tokens` is called within `step`.

        Returns:
            A handle that tells the request's progress and has its result.

        Raises:
            ValueError: an argument is refused, as in `generate`; the request needs more cache slots than the engine
                has; or the model was moved to another dtype or device since the engine was made.
            RuntimeError: the engine is closed.
        """
        self._check_open()
        self._core.check_weights()
        with remedy_named():
            request = self.decoder.request(self._signals, input_ids, max_new_tokens, sampling, **options)
        if (slots := self._core.slots(request)) > self.pool.capacity:
            raise UserError(
                f"a prompt of {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens} need {slots} "
                f"cache slots with a step's tokens, and the engine has {self.pool.capacity}; lower max_new_tokens, or "
                "give the engine more cache_tokens"
            )
        self.decoder.check(request)
        handle = Handle(request)
        self._core.waiting.append(handle)
        return handle

    @property
    def waiting(self) -> int:
        """Number of submitted requests that have not begun."""
        return len(self._core.waiting)

    @property
    def running(self) -> int:
        """Number of requests that have begun and not ended."""
        return len(self._core.running)

    def step(self) -> bool:
        """Run one decode step for all running requests, prefill a chunk of waiting prompts, and stream new tokens.

        Returns:
            Whether any request still runs or waits; if so, call `step` again.

        Raises:
            KeyboardInterrupt: SIGINT or SIGTERM came, and the step is finished. On one rank, no request has ended, and
                all continue if `step` is called again. If there are several ranks, the running requests end as in
                `run`, once messages have told all ranks, which may be one step later; then all ranks raise. A signal in
                the very last step is raised only on the rank that got it.
            RuntimeError: called from a callback within a step, after an exception has interrupted a step, or the engine
                is closed.
        """
        alone = self.decoder.steps_with.alone
        signals = self._signals_of_step if alone else self._signals
        with signals:
            left = self._step()
        all_raise = not alone and Stop.INTERRUPTED in self._core.stopped_by
        received = signals.take() if alone or all_raise or not left else 0  # else other ranks wait in the next step
        if received or all_raise:
            raise interruption(received)
        return left

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed; make another one")

    def _step(self) -> bool:
        self._check_open()
        return self._core.step()

    def run(self, stops_at_failure: bool = False) -> None:
        """Call `step` until all requests have ended, or until some rank gets SIGINT or SIGTERM.

        A signal ends the running requests with the tokens that they have; `run` returns, and `signal` has its number.

        Args:
            stops_at_failure: return also as soon as a request fails.
        """
        ends = Stop.INTERRUPTED | Stop.FAILED if stops_at_failure else Stop.INTERRUPTED
        with self._signals:
            while self._step() and not self._core.stopped_by & ends:
                pass
        self.signal = self._signals.take()

    def cancel(self, handle: Handle, num_tokens: int | None = None) -> None:
        """End a request with the tokens that it has and the finish reason "cancelled"; an ended request stays as it is.

        Called from a callback, it takes effect at the end of the step.

        Args:
            handle: handle of the request.
            num_tokens: how many of the generated tokens to keep, in the output and in the history file; None: all.
                Among ranks, where only rank 0 asks stopping criteria, all may be some more than it has streamed.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        if not self._closed:
            self._core.cancel(handle, num_tokens)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel the texts that have not ended, and free all memory, even if an error's traceback holds the engine.

        The engine can't be used afterwards.
        """
        if self._closed:
            return
        self._closed = True
        self._core.__exit__(kind, error, traceback)
        del self.pool

    @property
    def available_slots(self) -> int:
        """Number of KV cache slots, one per token, that new requests can get; slots only kept for reuse count, too."""
        return self._core.available_slots

    def clear_prefixes(self) -> None:
        """Let no later prompt reuse the KV of earlier requests. Call it after changing the model's weights in place.

        Raises:
            RuntimeError: the engine is closed.
        """
        self._check_open()
        self._core.clear_prefixes()


def longest_text(decoder: StepDecoder) -> int:
    """Number of cache slots that an engine reserves per request by default: the model's context, at most 32768."""
    return min(context_limit(decoder.model) or LONGEST_TEXT, LONGEST_TEXT)


def slots_within_memory(decoder: StepDecoder, slots: int) -> int:
    """Number of cache slots that fit in half of the free memory of every rank, at most `slots`; equal on all ranks."""
    runner = decoder.runner
    with decoder.computing():
        free, each = free_bytes(runner.device), slot_bytes(runner.known_kinds)
    if free is not None and each:
        slots = min(slots, int(CACHE_SHARE * free) // each)
    return int(exchange(decoder.context.ranks, "making an Engine", [slots]).min())


def _no_room(error: CacheTooLarge, device: torch.device) -> UserError:
    """The error for the user where the engine's cache does not fit on the device."""
    free = free_bytes(device)
    there = "" if free is None else f", where {format_bytes(free)} are free"
    return UserError(f"{error} on {device}{there}; lower the engine's cache_tokens, or max_new_tokens of a batch")
