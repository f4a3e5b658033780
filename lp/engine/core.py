"""The engine's loop: sequences begin, take decode steps together, and end. `generate` runs it for a single sequence.

    step = schedule, begin, forward, sample, exchange, end, deliver

A sequence is one request's prompt and the tokens that are generated after it; the code calls it a text. The scheduler
is here: it decides which sequences take part in a step, and which chunks of prompts are prefilled in it.
`lp.engine.batch_step` computes the step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

import numpy as np

from lp.budget.policy import Budget, Company
from lp.checks import check_int
from lp.engine.batch_step import BatchStep
from lp.engine.caches import TextCaches
from lp.engine.decoder import computing_on
from lp.engine.generation import Generation
from lp.engine.interrupts import DeferredSignals
from lp.engine.memory import with_remedy
from lp.engine.output import GenerationOutput
from lp.engine.prefixes import CachedText
from lp.engine.request import Request
from lp.engine.step_decoder import StepDecoder
from lp.errors import UserError
from lp.models.adapters import check_text_adapter
from lp.models.captured_forests import CapturedForests
from lp.models.kv_pool import KVPool
from lp.parallel.message import Stop

# One forward pass: texts that take a decode step in it, and texts whose prompts it prefills, with how many tokens.
Batch = tuple[list[Generation], list[tuple[Generation, int]]]


class Handle:
    """A submitted request, as `Engine.submit` returns it: tells its progress, and has its result when it has ended.

    Attributes:
        request: the checked arguments; deleted when the request ends.
        generation: the state (tokens, KV cache, draft source) while decode steps run; None before and after.
        output: the result, as `generate` would return it; None until the request has ended. If it was cancelled, the
            output has the tokens so far.
        error: the exception that the request failed with; None if it did not fail.
        reused: number of the prompt's first tokens whose KV was copied from an earlier sequence.
        reusable: whether later prompts may reuse this KV; False once the model's weights may have changed.
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
        """Whether the request has ended: completed, cancelled or failed."""
        return self.output is not None or self.error is not None

    @property
    def num_cached(self) -> int:
        """Number of tokens of this request whose KV is cached now; 0 before it begins and after it has ended."""
        return self.generation.cache.length if self.generation else 0

    @property
    def tokens(self) -> list[int]:
        """Ids of the tokens generated so far; if the request has failed, those generated before the failure."""
        return self.generation.tokens[: self.generation.delivery.num_kept] if self.generation else self._tokens

    def end(self, output: GenerationOutput | None, error: BaseException | None = None) -> None:
        """Store how the request ended, and release its state, since its noise and draft source take much memory.

        Args:
            output: the result; None if the request failed.
            error: the exception that it failed with; None if it did not fail.
        """
        self._tokens = output.tokens if output else self.tokens
        self.output, self.error = output, error and with_remedy(error)
        self.generation = None
        del self.request

    def result(self) -> GenerationOutput:
        """The output of the request, which must have ended.

        Raises:
            RuntimeError: the request has not ended yet.
            BaseException: the exception that the request failed with.
        """
        if self.error:
            try:
                raise self.error
            finally:
                del self  # in a frame of the error's traceback, it would keep what failed until gc finds the cycle
        if self.output is None:
            raise RuntimeError("this text has not ended; call engine.step() until it is done")
        return self.output


class EngineCore:
    """The scheduler: runs decode steps over several sequences at a time, for `Engine` and for `generate`.

    A sequence is a prompt and the tokens generated after it. The arguments of requests were checked before. If there
    are several ranks, all make the same calls in the same order.

    Args:
        decoder: makes the state of each sequence, and says which ranks share its steps.
        pool: the cache slots that all sequences share.
        max_sequences: most sequences that take steps at a time; the others wait.
        prefill_chunk: most prompt tokens that a step prefills while other sequences decode in it.
        reuse_prefixes: keep the caches of ended sequences, for prompts that begin with the same tokens.
        signals: holds SIGINT and SIGTERM back until the end of a step; a signal ends the running sequences.
        shared: replays forward passes over several sequences as CUDA graphs; None: such passes are launched one
            operation at a time.

    Attributes:
        stopped_by: flags from the ranks' messages that ended sequences in the last step, with Stop.FAILED if a sequence
            failed.
        waiting: handles of the requests that have not begun, in the order in which they came.
        running: handles of the sequences that take steps, by their state, in the order in which they began.
        in_step: whether a step is being computed; it stays True after an exception has interrupted a step.
    """

    def __init__(
        self,
        decoder: StepDecoder,
        pool: KVPool,
        max_sequences: int,
        prefill_chunk: int,
        reuse_prefixes: bool,
        signals: DeferredSignals,
        shared: CapturedForests | None = None,
    ) -> None:
        self.decoder = decoder
        self.max_sequences = max_sequences
        self.prefill_chunk = prefill_chunk
        self.signals = signals
        self.stopped_by = Stop.NONE
        self.waiting: deque[Handle] = deque()
        self.running: dict[Generation, Handle] = {}
        self.in_step = False
        self._shared = shared
        self._caches = TextCaches(decoder.runner, pool, reuse_prefixes)
        self._steps = BatchStep(decoder.runner, decoder.steps_with, shared)
        self._weights = weights_of(decoder)
        self._device = decoder.model.device  # kept: transformers looks for it among all parameters
        self._cancelled: list[tuple[Handle, int | None]] = []  # within the step

    def check_weights(self) -> None:
        """Refuse to continue if the model was moved to another dtype or device since the engine's cache was made.

        Raises:
            ValueError: names the dtype and device of the model and of the cache.
        """
        if (now := weights_of(self.decoder)) != self._weights:
            raise UserError(
                f"the model is {now} now, and this engine's cache is for {self._weights}; make another engine"
            )

    def slots(self, request: Request) -> int:
        """Most cache slots (one per token) that a request may need: for its own tokens and for those of one step."""
        return request.limit + 1 + self.decoder.most_step_tokens

    def step(self) -> bool:
        """Begin waiting requests, then run one decode step for all running sequences and prefill a chunk of prompts.

        Returns:
            Whether any request still runs or waits.

        Raises:
            RuntimeError: called from a callback within a step, or after an exception has interrupted a step.
        """
        if self.in_step:
            raise RuntimeError(
                "this engine is within a step, or an error has cut one off; step between steps, or make another engine"
            )
        if self.waiting:
            self.check_weights()  # again: they may have changed since the text was submitted
        self.in_step = True
        self.stopped_by = Stop.NONE
        self.signals.begin_step()
        self.admit()
        with computing_on(self._device):
            stops = self._advance()
        for text, stop in stops.items():
            if stop:
                self._end(text, stop)
        failed = self._steps.errors
        while failed:  # no variable has an error: a traceback may reach this frame
            self._fail(*failed.popitem())
        self.in_step = False
        while self._cancelled:
            self.cancel(*self._cancelled.pop())
        return bool(self.running or self.waiting)

    def cancel(self, handle: Handle, num_tokens: int | None = None) -> None:
        """End a request with the tokens that it has, at the end of the current step if there is one.

        Args:
            handle: handle of the request.
            num_tokens: how many of the generated tokens to keep; None: all.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        if num_tokens is not None:
            check_int("num_tokens", num_tokens, 0, math.inf, "say how many of the generated tokens to keep")
        if self.in_step:
            self._cancelled.append((handle, num_tokens))
        elif handle in self.waiting:
            self.waiting.remove(handle)
            output = GenerationOutput([], "cancelled", [])
            self.decoder.complete(output, handle.request)
            output.attention = ""  # which has computed nothing
            handle.end(output)
        elif handle.generation in self.running:
            text = handle.generation
            assert text is not None
            text.delivery.num_kept = len(text.tokens[:num_tokens])
            self._end(text, Stop.INTERRUPTED, "cancelled")

    @property
    def available_slots(self) -> int:
        """Number of cache slots that new requests can get; slots that are only kept for prefix reuse count, too."""
        return self._caches.available

    def clear_prefixes(self) -> None:
        """Let no later prompt reuse the KV of requests that have begun by now, whether they have ended or still run."""
        self._caches.clear_prefixes()
        for handle in self.running.values():
            handle.reusable = False

    def __enter__(self) -> EngineCore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel the texts that have not ended, and free all memory."""
        for handle in () if self.in_step else (*self.waiting, *self.running.values()):
            self.cancel(handle)
        for handle in (*self.waiting, *self.running.values()):  # left by a step that was cut off; callers may hold them
            handle.end(GenerationOutput(handle.tokens, "cancelled", []))
        for text in self.running:
            with suppress(Exception):  # the error that cut it off counts
                text.finish_learning()
        self._caches.close(kind, error, traceback)
        self.waiting.clear()
        self.running.clear()
        del self._caches, self._steps, self._shared

    def admit(self) -> None:
        """Begin waiting requests in the order in which they came, while there is room; every step calls this first."""
        while self.waiting and len(self.running) < self.max_sequences:
            if not self._caches.has_room(self.slots(self.waiting[0].request)):
                break
            with computing_on(self._device):
                self._begin(self.waiting[0])

    def _begin(self, handle: Handle) -> None:
        """Begin the first of the waiting texts: give it a KV cache, a draft source and a token budget."""
        request = handle.request
        by_itself = not self.running and len(self.waiting) == 1
        try:
            if request.adapter is not None:
                check_text_adapter(self.decoder.model, request.adapter)  # again: it may have been deleted meanwhile
            if self._caches.follow_model():
                self.clear_prefixes()
            beginning = self.decoder.begin(request, self.max_sequences)
        except Exception as error:
            self._end_waiting(handle, error)
            return
        # An error here ends the engine: the caches of other texts lie in the same memory, and may be half moved.
        slots = cache_slots(request, beginning.budget) + self.decoder.runner.most_padding
        cache, handle.reused = self._caches.take(slots, request, self._reusable)
        if by_itself:
            cache = self._caches.captured(cache)
        try:
            text = self.decoder.generation(request, beginning, cache, self._steps.timer)
            if by_itself:
                self.decoder.capture_steps(partial(self._steps.capture, text))
        except Exception as error:
            self._caches.give_back(cache, error=error)
            self._end_waiting(handle, error)
            return
        handle.generation = text
        handle.admitted_s = handle.first_step_s = time.perf_counter()
        self.running[text] = handle
        self.waiting.popleft()  # not before: whatever is raised, the engine has the text

    def _end_waiting(self, handle: Handle, error: Exception) -> None:
        """End the first of the waiting texts with an error, since it cannot begin.

        Args:
            handle: the text.
            error: why it cannot begin.

        Raises:
            Exception: `error`, among ranks, where the others would wait for this one.
        """
        if not self.decoder.steps_with.alone:
            raise error
        self.waiting.popleft()
        self.stopped_by |= Stop.FAILED
        handle.end(None, error)

    def _reusable(self) -> list[CachedText]:
        """The running texts whose KV a new prompt may reuse."""
        return [
            CachedText(
                np.array(text.request.keyed(text.cached_everywhere), np.int64), text.cache, text.request.kept_for
            )
            for text, handle in self.running.items()
            if handle.reusable and text.request.kept_for is not None
        ]

    def _advance(self) -> dict[Generation, Stop]:
        """Run the forward passes of one step.

        Returns:
            For each text that took a decode step, why it ends with it; Stop.NONE: it goes on.
        """
        if self._shared and self._shared.captures and len(self.running) > 1:
            for text in self.running:
                if cache := self._caches.in_pool(text.cache):
                    text.cache = cache  # which holds what that one does
        self._read_images()
        stops: dict[Generation, Stop] = {}
        for texts, prompts in self._batches():
            self._tell_company(texts, sum(count for _, count in prompts))
            with self.decoder.context.ranks.stepping(sum(text.message_shape.size for text in texts)):
                stops |= self._steps.run(texts, prompts)
            self._note_first_steps(prompts)
        return stops

    def _read_images(self) -> None:
        """Prefill the images of at most one text a step, so that the other texts do not wait for several of them."""
        for text, handle in self.running.items():
            if text.prompt.lacks_images(text.cache):
                self._steps.read_images(text)
                handle.first_step_s = time.perf_counter()  # later, if the prompt has more tokens after them
                return

    def _batches(self) -> Iterator[Batch]:
        """Divide a step into forward passes: one for all texts, or one a text if the model takes no more."""
        ready = [text for text in self.running if text not in self._steps.errors]
        texts = [text for text in ready if text.prompt.is_cached(text.cache)]
        prompts = [text for text in ready if text.prompt.takes_chunks(text.cache)]
        if self.decoder.runner.takes_forests:
            yield texts, self._chunks(prompts, bool(texts))
            return
        for text in prompts:
            yield [], [(text, text.prompt.chunk_size(text.cache, text.request.prefill_chunk))]
        for text in texts:
            yield [text], []

    def _chunks(self, prompts: Sequence[Generation], in_company: bool) -> list[tuple[Generation, int]]:
        """How many tokens of each prompt the step prefills, first come first.

        Args:
            prompts: texts whose prompts are not cached yet.
            in_company: whether other texts decode in the step, which should not take long then.
        """
        chunks = []
        room = self.prefill_chunk
        if prompts and not in_company:
            room = max(room, prompts[0].request.prefill_chunk)
        for text in prompts:
            if count := text.prompt.chunk_size(text.cache, room):
                chunks.append((text, count))
                room -= count
        return chunks

    def _note_first_steps(self, prompts: Sequence[tuple[Generation, int]]) -> None:
        """Note the time at which prompts are completely cached: from here on, their texts decode."""
        now = time.perf_counter()
        for text, _ in prompts:
            if text.prompt.is_cached(text.cache):
                self.running[text].first_step_s = now

    def _tell_company(self, texts: Sequence[Generation], prompt_tokens: int) -> None:
        """Tell each text's token budget how much the step computes for the other texts; the same on every rank."""
        if len(texts) == 1:
            texts[0].budget.company = Company(other_tokens=prompt_tokens)
            return
        times = self.decoder.step_times
        total = sum(text.last_tokens for text in texts)
        rate = 0.0
        if times and texts:
            others_work_s = (len(texts) - 1) * times.own_work_s
            rate = sum(text.budget.tokens_per_step for text in texts) / (times.step_s(total) + others_work_s)
        for text in texts:
            text.budget.company = Company(len(texts), total - text.last_tokens + prompt_tokens, rate)

    def _end(self, text: Generation, stop: Stop, reason: str | None = None) -> None:
        """Take a text that has ended out of the running ones, store its output, and give its cache back.

        Args:
            text: the text.
            stop: why it ended.
            reason: its finish reason, if it differs from that of `stop`: "cancelled".
        """
        handle = self.running.pop(text)
        now = time.perf_counter()
        self.stopped_by |= text.delivery.stopped_by
        failure: BaseException | None = None
        try:
            text.finish()
            output = text.output(stop, handle.first_step_s - handle.admitted_s, now - handle.first_step_s)
            self.decoder.complete(output, handle.request)
        except BaseException as error:
            failure = error
            handle.end(None, error)
        else:
            output.finish_reason = reason or output.finish_reason
            output.reused = handle.reused
            handle.end(output)
            self.decoder.ended(output.step_stats)
        owner = text.request.kept_for
        keeps = self._caches.reuses and handle.reusable and owner is not None
        tokens = text.request.keyed(text.cached_everywhere) if keeps else []
        with computing_on(self._device):
            # Alike on every rank, whatever went wrong on one.
            self._caches.give_back(text.cache, tokens, failure, owner or "")
        failure = None  # whose traceback has this frame

    def _fail(self, text: Generation, error: BaseException) -> None:
        """Take a text that has failed, on every rank alike, out of the running ones, and free its cache."""
        self.stopped_by |= Stop.FAILED
        self.running.pop(text).end(None, error)
        with suppress(Exception):  # the first error counts
            text.finish_learning()
        with computing_on(self._device):
            self._caches.give_back(text.cache, error=error)


def cache_slots(request: Request, budget: Budget) -> int:
    """Number of cache slots for one request: one for each of its tokens, and one for each token of its largest step."""
    return request.limit + 1 + max(budget.step_tokens, budget.max_padded_tokens)


def weights_of(decoder: StepDecoder) -> str:
    """Dtype and device of a decoder's model, such as "bfloat16 on cuda:0"; its KV caches must have the same ones."""
    return f"{str(decoder.model.dtype).removeprefix('torch.')} on {decoder.model.get_input_embeddings().weight.device}"
