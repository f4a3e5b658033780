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

import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from lp.budget.policy import Company
from lp.checks import check_int, check_switch
from lp.engine.batch_step import BatchStep
from lp.engine.decode_loop import Generation
from lp.engine.inputs import Prompt
from lp.engine.interrupts import DeferredSignals, SignalsOfSteps, interruption
from lp.engine.memory import remedy_named, with_remedy
from lp.engine.output import GenerationOutput
from lp.engine.prefixes import CachedText, Prefixes
from lp.engine.request import Request
from lp.engine.step_decoder import StepDecoder
from lp.errors import UserError
from lp.models.captured_forests import CapturedForests, pool_for
from lp.models.fused import model_state
from lp.models.kv_cache import CacheTooLarge, StaticKVCache
from lp.models.kv_pool import slot_bytes
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


class Handle:
    """A text that an engine generates. Once it has ended, its output is all that is held.

    Attributes:
        request: the checked call, until it has ended.
        generation: its state, while it takes steps.
        output: of the text, once it has ended; of a cancelled one as far as it came.
        error: what it failed with.
        reused: tokens of the prompt that were cached before.
        reusable: its cache is of the model as it is now.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.output: GenerationOutput | None = None
        self.error: BaseException | None = None
        self.reused = 0
        self.reusable = True
        self.generation: Generation | None = None
        self._tokens: list[int] = []  # once it has ended
        self.admitted_s = 0.0
        self.first_step_s = 0.0

    @property
    def done(self) -> bool:
        """It has ended, in whatever way."""
        return self.output is not None or self.error is not None

    @property
    def tokens(self) -> list[int]:
        """Generated so far, or until it failed."""
        return self.generation.tokens[: self.generation.num_kept] if self.generation else self._tokens

    def end(self, output: GenerationOutput | None, error: BaseException | None = None) -> None:
        """Note what it came to, and let go of the rest: its noise and draft source are large."""
        self._tokens = output.tokens if output else self.tokens
        self.output, self.error = output, error and with_remedy(error)
        self.generation = None
        del self.request

    def result(self) -> GenerationOutput:
        """The output.

        Raises:
            RuntimeError: it has not ended.
            BaseException: what it failed with.
        """
        if self.error:
            try:
                raise self.error
            finally:
                del self  # in a frame of the error's traceback, it would keep what failed until gc finds the cycle
        if self.output is None:
            raise RuntimeError("this text has not ended; call engine.step() until it is done")
        return self.output


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """The cache of captured steps, which one text has.

    Attributes:
        cache: that.
        in_pool: the text's own slots in the pool.
        until: is closed when the text has ended.
    """

    cache: StaticKVCache
    in_pool: StaticKVCache
    until: ExitStack


class Engine:
    """Generates texts that come and go. Among ranks, all make the same calls in the same order.

    One thread makes all calls; others hand it what they want, and wake it where `step` has returned False. Callbacks
    may submit and cancel. An exception that leaves `step` or `run`, but for a KeyboardInterrupt behind a step, cuts the
    step off: the engine is of no more use. As a context manager, it cancels what has not ended, and lets go of its
    memory, at the end of the block.

    Args:
        decoder: whose steps the texts take.
        max_sequences: that take a step together.
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
            check_same(decoder.context, "making an Engine", settings)
            try:
                self.pool = pool_for(runner, capacity)
            except CacheTooLarge as error:
                raise _no_room(error, runner.device) from error
        self._prefixes = Prefixes(self.pool.give_back)
        self._reuse_prefixes = reuse_prefixes
        self._model_state = model_state(runner.model)
        self._weights = _weights(decoder)
        self._passes = CapturedForests(runner, self.pool, self.max_sequences)
        self._steps = BatchStep(runner, decoder.steps_with, self._passes)
        self._waiting: deque[Handle] = deque()
        self._running: dict[Generation, Handle] = {}
        self._of_last_pass: weakref.ref[Generation] | None = None  # where a pass takes one text
        self._signals = SignalsOfSteps()  # that end texts
        self._signals_of_step = DeferredSignals()  # that are raised behind a step, and end none
        self._stopped_by = Stop.NONE  # why texts ended in the last step
        self.signal = 0
        self._borrowed: _Borrowed | None = None
        self._in_step = False  # also once a step was cut off
        self._cancelled: list[Handle] = []  # within the step
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
            input_ids, max_new_tokens, sampling, options: as in `generate`. `on_tokens` is called in `step`.

        Raises:
            ValueError: as `generate`; a text that needs more cache slots than there are; a model that has another dtype
                or device than when the engine was made.
            RuntimeError: the engine is closed.
        """
        self._check_open()
        self._check_weights()
        with remedy_named():
            request = self.decoder.request(self._signals, input_ids, max_new_tokens, sampling, **options)
        if (slots := self._slots(request)) > self.pool.capacity:
            raise UserError(
                f"a prompt of {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens} need {slots} "
                f"cache slots with a step's tokens, and the engine has {self.pool.capacity}; lower max_new_tokens, or "
                "give the engine more cache_tokens"
            )
        self.decoder.check(request)
        handle = Handle(request)
        self._waiting.append(handle)
        return handle

    @property
    def waiting(self) -> int:
        """Texts that have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Texts that take steps."""
        return len(self._running)

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
        all_raise = not alone and Stop.INTERRUPTED in self._stopped_by
        received = signals.take() if alone or all_raise or not left else 0  # else other ranks wait in the next step
        if received or all_raise:
            raise interruption(received)
        return left

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed; make another one")

    def _check_weights(self) -> None:
        if (now := _weights(self.decoder)) != self._weights:
            raise UserError(
                f"the model is {now} now, and this engine's cache is for {self._weights}; make another engine"
            )

    def _step(self) -> bool:
        self._check_open()
        if self._in_step:
            raise RuntimeError(
                "this engine is within a step, or an error has cut one off; step between steps, or make another engine"
            )
        if self._waiting:
            self._check_weights()  # again: they may have changed since the text was submitted
        self._in_step = True
        self._stopped_by = Stop.NONE
        self._signals.begin_step()
        with self.decoder.computing():
            self._admit()
            stops = self._advance()
        for text, stop in stops.items():
            if stop:
                self._end(text, stop)
        failed = self._steps.errors
        while failed:  # no variable has an error: a traceback may reach this frame
            self._fail(*failed.popitem())
        self._in_step = False
        while self._cancelled:
            self.cancel(self._cancelled.pop())
        return bool(self._running or self._waiting)

    def run(self, stops_at_failure: bool = False) -> None:
        """Step until all texts have ended. SIGINT or SIGTERM on some rank ends those that run as they are, and returns.

        Args:
            stops_at_failure: return when a text fails, too.
        """
        ends = Stop.INTERRUPTED | Stop.FAILED if stops_at_failure else Stop.INTERRUPTED
        with self._signals:
            while self._step() and not self._stopped_by & ends:
                pass
        self.signal = self._signals.take()

    def cancel(self, handle: Handle) -> None:
        """End a text as it is; its output has the finish reason "cancelled". Nothing happens if it has ended.

        Called by a callback, it ends the text behind the step, unless the step itself does.
        """
        if self._in_step:
            self._cancelled.append(handle)
        elif handle in self._waiting:
            self._waiting.remove(handle)
            output = GenerationOutput([], "cancelled", [])
            self.decoder.complete(output, handle.request)
            output.attention = ""  # which has computed nothing
            handle.end(output)
        elif handle.generation in self._running:
            text = handle.generation
            assert text is not None
            text.num_kept = len(text.tokens)
            self._end(text, Stop.INTERRUPTED, "cancelled")

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
        for handle in () if self._in_step else (*self._waiting, *self._running.values()):
            self.cancel(handle)
        self._closed = True
        for handle in (*self._waiting, *self._running.values()):  # of a step that was cut off: others may hold them
            handle.end(GenerationOutput(handle.tokens, "cancelled", []))
        borrowed, self._borrowed = self._borrowed, None
        if borrowed:
            borrowed.until.__exit__(kind, error, traceback)
        self._waiting.clear()
        self._running.clear()
        del self.pool, self._prefixes, self._passes, self._steps

    def clear_prefixes(self) -> None:
        """Reuse no text that there has been so far, as must be done when weights are changed in place.

        Raises:
            RuntimeError: the engine is closed.
        """
        self._check_open()
        self._prefixes.clear()
        for handle in self._running.values():
            handle.reusable = False

    def _slots(self, request: Request) -> int:
        """Cache slots that a text may need."""
        return request.limit + 1 + self.decoder.most_step_tokens

    def _admit(self) -> None:
        """Begin texts that wait, in their order, while there is room."""
        while self._waiting and len(self._running) < self.max_sequences:
            handle = self._waiting[0]
            cache = self._cache_for(handle)
            if cache is None:
                break
            decoder = self.decoder
            by_itself = not self._running and len(self._waiting) == 1
            if by_itself:
                cache = self._captured_cache(cache)
            try:
                beginning = decoder.begin(handle.request, self.max_sequences)
                text = decoder.generation(handle.request, beginning, cache, self._steps.timer)
                if by_itself:
                    decoder.capture_steps(text)
            except Exception as error:
                if not decoder.steps_with.alone:
                    raise
                self._waiting.popleft()
                self.pool.give_back(self._returned(cache, 0, error))
                self._stopped_by |= Stop.FAILED
                handle.end(None, error)
                continue
            handle.generation = text
            handle.admitted_s = handle.first_step_s = time.perf_counter()
            self._running[text] = handle
            self._waiting.popleft()  # not before: whatever is raised, the engine has the text

    def _cache_for(self, handle: Handle) -> StaticKVCache | None:
        """A cache for a text, with what is cached of its prompt; None where it has to wait."""
        slots = self._slots(handle.request)
        if self.pool.free + self._prefixes.slots < slots:
            return None
        runner = self.decoder.runner
        runner.follow()
        if (state := model_state(runner.model)) != self._model_state:  # another adapter, other weights
            self.clear_prefixes()
            self._model_state = state
        source, count = self._longest_prefix(handle.request.prompt[:-1])
        while self.pool.free < slots and self._prefixes.drop_oldest(but=source):
            pass
        states = None
        if source is not None and self.pool.free < slots:  # the text gets the slots of its own prefix, too
            states = [states.clone() for states in source.cache.first(count)]
            self._prefixes.clear()
        cache = self.pool.allocate(slots)
        assert cache is not None
        if source is not None:
            cache.begin_with(states or source.cache.first(count), count)
        handle.reused = count
        return cache

    def _captured_cache(self, cache: StaticKVCache) -> StaticKVCache:
        """For a text that begins by itself, the cache of captured steps, where there is one and nobody has it.

        Its slots in the pool stay its own, so that they are the same on ranks that do not capture. In company it
        goes on there if steps of several texts are captured, else with this cache, uncaptured.

        Args:
            cache: in the pool; what it has is copied.
        """
        runner = self.decoder.runner
        if runner.captured is None or runner.captured.reserved:
            return cache
        with ExitStack() as stack:
            captured = stack.enter_context(runner.borrowed_cache(cache.capacity))
            if runner.captures(captured):
                if cache.length:
                    captured.begin_with(cache.first(cache.length), cache.length)
                self._borrowed = _Borrowed(captured, cache, stack.pop_all())
                return captured
        return cache

    def _returned(self, cache: StaticKVCache, num_tokens: int, error: BaseException | None = None) -> StaticKVCache:
        """The cache in the pool of a text that has ended.

        Args:
            cache: that the text had, which may be that of captured steps.
            num_tokens: to copy from there.
            error: that the text ended with.
        """
        if self._borrowed is None or cache not in (self._borrowed.cache, self._borrowed.in_pool):
            return cache
        borrowed, self._borrowed = self._borrowed, None
        if cache is borrowed.cache:
            self._copy_to_pool(borrowed, num_tokens)
        if error is None:
            borrowed.until.close()
        else:
            borrowed.until.__exit__(type(error), error, error.__traceback__)
        return borrowed.in_pool

    def _copy_to_pool(self, borrowed: _Borrowed, num_tokens: int) -> None:
        """Copy so many tokens from the cache of captured steps into the text's own slots."""
        borrowed.in_pool.length = 0
        if num_tokens:
            with self.decoder.computing():
                borrowed.in_pool.begin_with(borrowed.cache.first(num_tokens), num_tokens)

    def _go_on_in_pool(self) -> None:
        """The text that began by itself goes on in the pool: captured steps of several texts read no other cache.

        The cache that it had stays reserved for it, with the memory that its sampler draws noise into.
        """
        borrowed = self._borrowed
        for text in self._running:
            if borrowed and text.cache is borrowed.cache:
                self._copy_to_pool(borrowed, text.cache.length)
                text.go_on_in(borrowed.in_pool)

    def _reuses(self) -> bool:
        return self._reuse_prefixes and self.decoder.runner.takes_forests

    def _longest_prefix(self, prompt: Sequence[int]) -> tuple[CachedText | None, int]:
        """The text whose cache begins with most of a prompt, and how much of it; None and 0 where none does."""
        if not self._reuses():
            return None, 0
        running = [
            CachedText(np.array(text.cached_everywhere, np.int64), text.cache)
            for text, handle in self._running.items()
            if handle.reusable
        ]
        return self._prefixes.longest(prompt, running)

    def _advance(self) -> dict[Generation, Stop]:
        """The step; by text, why it ends, or NONE."""
        texts = [text for text in self._running if text.prefilled]
        prompts = [text for text in self._running if not text.prefilled]
        if not self.decoder.runner.takes_forests:
            return self._one_after_another(texts, prompts)
        chunks = self._chunks(prompts, bool(texts))
        self._tell_company(texts, sum(count for _, count in chunks))
        if self._passes.captures and len(self._running) > 1:
            self._go_on_in_pool()
        with self.decoder.context.stepping(sum(text.message_shape.size for text in texts)):
            stops = self._steps.run(texts, chunks)
        self._note_first_steps([text for text, _ in chunks])
        return stops

    def _one_after_another(self, texts: Sequence[Generation], prompts: Sequence[Generation]) -> dict[Generation, Stop]:
        """The same where a pass takes one text."""
        stops: dict[Generation, Stop] = {}
        for text in [*prompts, *texts]:
            try:
                with self.decoder.context.stepping(text.message_shape.size):
                    if self._of_last_pass is None or self._of_last_pass() is not text:  # which may have ended by now
                        self.decoder.runner.forget_growth(text.cache)
                    self._of_last_pass = weakref.ref(text)
                    if text in prompts:
                        text.prefill()
                    else:
                        stops |= self._steps.run([text])
            except Exception as error:
                self._steps.note_error(text, error)
        self._note_first_steps(prompts)
        return stops

    def _note_first_steps(self, prompts: Sequence[Generation]) -> None:
        """Those that are cached now take steps from here on."""
        now = time.perf_counter()
        for text in prompts:
            if text.prefilled:
                self._running[text].first_step_s = now

    def _chunks(self, prompts: Sequence[Generation], in_company: bool) -> list[tuple[Generation, int]]:
        """How much of which prompts the step caches: in the order in which they came."""
        chunks = []
        room = self.prefill_chunk
        if prompts and not in_company:
            room = max(room, prompts[0].request.prefill_chunk)
        for text in prompts:
            if count := min(room, len(text.request.prompt) - 1 - text.cache.length):
                chunks.append((text, count))
                room -= count
        return chunks

    def _tell_company(self, texts: Sequence[Generation], prompt_tokens: int) -> None:
        """Tell the budgets what else the step computes; the same on every rank."""
        times = self.decoder.step_times
        total = sum(text.last_tokens for text in texts)
        rate = 0.0
        if times and texts:
            others_work_s = (len(texts) - 1) * times.own_work_s
            rate = sum(text.budget.tokens_per_step for text in texts) / (times.step_s(total) + others_work_s)
        for text in texts:
            text.budget.company = Company(len(texts), total - text.last_tokens + prompt_tokens, rate)

    def _end(self, text: Generation, stop: Stop, reason: str | None = None) -> None:
        """Take a text that has ended out of the steps.

        Args:
            stop: why it ended.
            reason: the finish reason, where no stop tells it.
        """
        handle = self._running.pop(text)
        now = time.perf_counter()
        self._stopped_by |= text.stopped_by
        try:
            output = text.output(stop, handle.first_step_s - handle.admitted_s, now - handle.first_step_s)
            self.decoder.complete(output, handle.request)
        except BaseException as error:
            handle.end(None, error)
        else:
            output.finish_reason = reason or output.finish_reason
            output.reused = handle.reused
            handle.end(output)
            self.decoder.ended(output.step_stats)
        self._keep_or_give_back(text, handle.reusable)

    def _fail(self, text: Generation, error: BaseException) -> None:
        """The same of a text that has failed alike on every rank."""
        self._stopped_by |= Stop.FAILED
        self._running.pop(text).end(None, error)
        self.pool.give_back(self._returned(text.cache, 0, error))

    def _keep_or_give_back(self, text: Generation, reusable: bool) -> None:
        """The cache of a text that has ended: the same on every rank, whatever went wrong on one of them."""
        tokens = text.cached_everywhere if self._reuses() and reusable else []
        cache = self._returned(text.cache, len(tokens))
        if not tokens:
            self.pool.give_back(cache)
            return
        self.pool.shrink(cache, len(tokens))
        self._prefixes.keep(tokens, cache)


def _weights(decoder: StepDecoder) -> str:
    """What the cache's tensors are alike in, for a message."""
    return f"{str(decoder.model.dtype).removeprefix('torch.')} on {decoder.model.get_input_embeddings().weight.device}"


def longest_text(decoder: StepDecoder) -> int:
    """Cache slots of the longest text that a place of an engine has room for by default."""
    return min(context_limit(decoder.model) or LONGEST_TEXT, LONGEST_TEXT)


def slots_within_memory(decoder: StepDecoder, slots: int) -> int:
    """As many of these cache slots as there is memory for on every rank."""
    runner = decoder.runner
    with decoder.computing():
        free, each = free_bytes(runner.device), slot_bytes(runner.known_kinds)
    if free is not None and each:
        slots = min(slots, int(CACHE_SHARE * free) // each)
    return int(exchange(decoder.context, "making an Engine", [slots]).min())


def _no_room(error: CacheTooLarge, device: torch.device) -> UserError:
    free = free_bytes(device)
    there = "" if free is None else f", where {format_bytes(free)} are free"
    return UserError(f"{error} on {device}{there}; lower the engine's cache_tokens, or max_new_tokens of a batch")
