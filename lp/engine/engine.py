"""The engine: texts come, take steps together, and go.

    engine = lp.Engine(decoder)
    one, other = engine.submit(ids, 100), engine.submit(more_ids, 50, lp.SamplingParams(seed=7))
    engine.run()                                   # or engine.step() until it returns False
    one.result().tokens, other.result().tokens

First come, first served: a text waits until one of `max_sequences` places and the cache slots that it may need are
free. Prompts are cached in chunks, in the steps that the other texts take anyway. Each text has the tokens that it has
alone; under one seed, whatever else runs.
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

MAX_SEQUENCES = 8  # that take a step together, by default
MOST_SEQUENCES = 1 << 16  # the largest max_sequences that is accepted
PREFILL_CHUNK = 128  # tokens of prompts in a step that others take part in
CACHE_SHARE = 0.5  # of the free memory, that the cache may take by default
LONGEST_TEXT = 32768  # tokens that a place gets by default, where the model's context is longer


class Engine:
    """Generates texts that come and go. Among ranks, all make the same calls in the same order.

    One thread makes all calls; others hand it what they want, and wake it where `step` has returned False. Callbacks
    may submit and cancel. An exception that leaves `step` or `run`, but for a KeyboardInterrupt behind a step, cuts the
    step off: the engine is of no more use. As a context manager, it cancels what has not ended, and lets go of its
    memory, at the end of the block.

    Args:
        decoder: the decoder whose steps the texts take.
        max_sequences: most texts that take a step together.
        cache_tokens: cache slots for all texts; None: for the longest texts there may be, as far as half of the free
            memory goes.
        prefill_chunk: tokens of prompts in a step that other texts take part in: they wait for no more.
        reuse_prefixes: keep the caches of texts that have ended, for prompts that begin like them.

    Attributes:
        signal: number of the signal that ended the last `run`; 0 for none on this rank.

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
        self._signals = SignalsOfSteps()  # that end texts
        self._signals_of_step = DeferredSignals()  # that are raised behind a step, and end none
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
        """Add a text, which begins in one of the next steps.

        Args:
            input_ids, max_new_tokens, sampling, options: see `generate`. `on_tokens` is called in `step`.

        Raises:
            ValueError: as `generate`; a text that needs more cache slots than there are; a model that has another dtype
                or device than when the engine was made.
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
        """Number of texts that have not begun."""
        return len(self._core.waiting)

    @property
    def running(self) -> int:
        """Number of texts that take steps now."""
        return len(self._core.running)

    def step(self) -> bool:
        """One step of all texts that run, and a chunk of prompts; whether there is anything left to do.

        Raises:
            KeyboardInterrupt: SIGINT or SIGTERM came, and the step is finished; texts go on with the next one. Among
                ranks those that run end, as in `run`, in the step whose messages tell the others, which may be the next
                one; all ranks raise, but for a signal within the very last step, of which only its own rank knows.
            RuntimeError: called by a callback of a step, or after a step that was cut off by an error.
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
        """Step until all texts have ended. SIGINT or SIGTERM on some rank ends those that run as they are, and returns.

        Args:
            stops_at_failure: return when a text fails, too.
        """
        ends = Stop.INTERRUPTED | Stop.FAILED if stops_at_failure else Stop.INTERRUPTED
        with self._signals:
            while self._step() and not self._core.stopped_by & ends:
                pass
        self.signal = self._signals.take()

    def cancel(self, handle: Handle, num_tokens: int | None = None) -> None:
        """End a text as it is; its output has the finish reason "cancelled". Nothing happens if it has ended.

        Called by a callback, it ends the text behind the step, unless the step itself does.

        Args:
            handle: the text.
            num_tokens: how many of its new tokens count: output and history have no others. None: all.
        """
        if not self._closed:
            self._core.cancel(handle, num_tokens)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel what has not ended, and let go of all memory, even where an error's traceback holds the engine.

        It is of no more use then.
        """
        if self._closed:
            return
        self._closed = True
        self._core.__exit__(kind, error, traceback)
        del self.pool

    @property
    def available_slots(self) -> int:
        """Cache slots that texts to come may have; caches of ended texts, kept for reuse, count among them."""
        return self._core.available_slots

    def clear_prefixes(self) -> None:
        """Reuse no text that there has been so far, as must be done when weights are changed in place.

        Raises:
            RuntimeError: the engine is closed.
        """
        self._check_open()
        self._core.clear_prefixes()


def longest_text(decoder: StepDecoder) -> int:
    """Cache slots of the longest text that a place of an engine has room for by default."""
    return min(context_limit(decoder.model) or LONGEST_TEXT, LONGEST_TEXT)


def slots_within_memory(decoder: StepDecoder, slots: int) -> int:
    """How many of these cache slots there is memory for on every rank."""
    runner = decoder.runner
    with decoder.computing():
        free, each = free_bytes(runner.device), slot_bytes(runner.known_kinds)
    if free is not None and each:
        slots = min(slots, int(CACHE_SHARE * free) // each)
    return int(exchange(decoder.context.ranks, "making an Engine", [slots]).min())


def _no_room(error: CacheTooLarge, device: torch.device) -> UserError:
    free = free_bytes(device)
    there = "" if free is None else f", where {format_bytes(free)} are free"
    return UserError(f"{error} on {device}{there}; lower the engine's cache_tokens, or max_new_tokens of a batch")
