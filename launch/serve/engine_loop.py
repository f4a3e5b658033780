"""The thread that runs the engine: it takes sequences from the endpoints, runs decode steps, and reports results.

With several ranks, only rank 0 gets sequences from endpoints. It sends every command (to submit or cancel a sequence,
and so on) to the other ranks before the decode step in which the command takes effect, so that all ranks make the same
calls of the engine in the same order.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import lp
from lp.engine.core import Handle
from lp.engine.output import StepStats
from lp.errors import UserError
from lp.sampling.logprob_sampler import Logprob, LogprobSampler

from .grammars import Grammars
from .prompt_logprobs import prompt_logprobs
from .reasoning import ReasoningWatch
from .spec import TextSpec
from .stopping import TextWatch

HEARTBEAT_S = 5.0  # among ranks, which find out by it that one has died while there is nothing to do


class Busy(Exception):
    """Raised by `EngineLoop` when its queue is full; the client may try again later.

    There is one queue for texts to generate, and one for prompts whose tokens' log probabilities are computed.
    """


class Closing(Exception):
    """Raised by `EngineLoop` when it accepts no more work: the server is ending, or its engine has failed."""


class Abandoned(Exception):
    """Error of a sequence that `EngineLoop.abandon` cut off, because the server ended before the sequence did."""


class Piece(NamedTuple):
    """An event with the text and tokens that one decode step added to a sequence.

    Attributes:
        text: new characters for the client. Characters that may begin a stop string are held back for a later event.
        tokens: token ids that the step added, up to the one that ends the text.
        logprobs: log probabilities of these tokens; empty if the client did not ask for them.
        thought: new characters of the model's reasoning, which comes before the answer and is not in `text`.
        num_thought: how many of `tokens` belong to the reasoning, including the tokens that begin and end it, such as
            "</think>".
    """

    text: str
    tokens: list[int]
    logprobs: list[Logprob]
    thought: str = ""
    num_thought: int = 0


class Ending(NamedTuple):
    """The last event of a sequence: why it ended, the rest of its characters, and its counts.

    Attributes:
        reason: `finish_reason` of `lp.GenerationOutput`, such as "eos" or "length"; "stop_string" also if the client's
            limit of indentation or time ended the text; "" if generation failed.
        text: last characters for the client, which were held back because they might have begun a stop string.
        thought: last characters of the reasoning.
        found: the stop string that ended the text; None if no stop string did.
        num_tokens: number of the text's tokens up to its end, including `resumed` ones.
        num_thought: number of the text's tokens that belong to the reasoning; 0 if reasoning is not separated from the
            answer.
        resumed: number of the text's first tokens that an earlier server generated; this server continued after these
            tokens.
        sequence: index of the sequence among the n choices for its prompt, from 0.
        prompt_tokens: number of the prompt's tokens.
        cached: number of the prompt's tokens that needed no prefill, as an earlier text had left their KV in the cache.
        steps: statistics of the sequence's decode steps.
        prefill_s, decode_s: seconds before the first decode step, and seconds from that step on.
        predicted: number of tokens of the client's predicted output that were accepted as draft tokens.
        error: the error that ended the sequence; None if there was none.
    """

    reason: str = ""
    text: str = ""
    thought: str = ""
    found: str | None = None
    num_tokens: int = 0
    num_thought: int = 0
    resumed: int = 0
    sequence: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    steps: list[StepStats] = []  # noqa: RUF012 - never changed
    prefill_s: float = 0.0
    decode_s: float = 0.0
    predicted: int = 0
    error: BaseException | None = None

    @property
    def generated(self) -> int:
        """Number of tokens that this server generated itself, leaving out the `resumed` ones."""
        return max(self.num_tokens - self.resumed, 0)


Event = Piece | Ending
Commands = list[dict[str, Any]]


@dataclass(eq=False)
class LiveText:
    """A sequence to generate and the callbacks of its client; it waits or is being generated.

    `EngineLoop.submit` takes such sequences.

    Args:
        spec: the prompt and all settings of the generation.
        watch: decodes the tokens and looks for stop strings; None on ranks other than 0, which have no clients.
        on_event: called on the engine's thread with a Piece after every decode step of the sequence, and with an Ending
            at its end; None on ranks other than 0.
        handle: the engine's handle of the sequence; None until the loop has submitted the sequence to the engine.
    """

    spec: TextSpec
    watch: TextWatch | ReasoningWatch | None = None
    on_event: Callable[[Event], None] | None = None
    handle: Handle | None = None


@dataclass(eq=False)
class Scoring:
    """A request for the log probabilities of a prompt's own tokens, for `EngineLoop.score`.

    Clients ask for them with `echo` and `logprobs`. Only rank 0 computes them.

    Args:
        prompt: token ids of the prompt.
        num_top: how many of the likeliest tokens are reported beside each token.
        on_done: called on the engine's thread with a list of log probabilities, one for each token but the first, or
            with the error.
        wanted: whether somebody still waits for the result; set it to False to have the scoring skipped.
    """

    prompt: list[int]
    num_top: int
    on_done: Callable[[list[Logprob] | BaseException], None]
    wanted: bool = True


class EngineLoop:
    """Lets many threads share one engine: it queues their sequences, runs the decode steps, and reports events to them.

    On rank 0, `start` runs the loop on a thread of its own. On the other ranks, `run` follows rank 0's commands until
    rank 0 closes the loop.

    Args:
        engine: the engine; nobody else may call it from now on.
        grammars: compiles the grammars that texts must follow.
        max_waiting: how many sequences may wait, in addition to the `engine.max_sequences` that are generated at a
            time.
        on_failure: called when the engine has failed and can't continue, on the thread that notices the failure.

    Attributes:
        failure: the error because of which the engine can't continue; None while it works.
    """

    def __init__(
        self, engine: lp.Engine, grammars: Grammars, max_waiting: int, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.engine = engine
        self.grammars = grammars
        self.decoder = engine.decoder
        self.context = engine.decoder.context
        self.max_texts = engine.max_sequences + max_waiting
        self.on_failure = on_failure
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._commands: deque[dict[str, Any]] = deque()
        self._scorings: deque[Scoring] = deque()
        self._scoring: Scoring | None = None  # the one that is computed, until somebody is told what came of it
        self._texts: dict[int, LiveText] = {}  # of rank 0, from submission on; of others, from their command on
        self._next_id = 0
        self._closing = False
        self._ended = False
        self._asked_s: float | None = None  # when `silent_s` asked for a turn that has not come
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the loop on a thread of its own, on rank 0; it runs until `close` is called or the engine fails."""
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> bool:
        """Accept no more sequences, finish the accepted ones, and end the loop on all ranks; called on rank 0.

        Args:
            timeout_s: seconds to wait for the loop's end; None: as long as it takes.

        Returns:
            Whether the loop has ended. If not, it is still finishing sequences.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    @property
    def takes_texts(self) -> bool:
        """Whether `submit` accepts sequences: the loop is not closing, and the engine has not failed."""
        return not (self._closing or self.failure)

    def abandon(self) -> None:
        """Cut off all sequences before the next decode step, with the error `Abandoned`.

        Any thread may call this, after `close`.
        """
        with self._changed:
            self._commands.append({"abandon": True})
            self._changed.notify()

    def silent_s(self) -> float:
        """How many seconds the loop has not responded, for a watchdog that calls this again and again.

        A call puts a question into the loop's queue, unless an earlier question still waits for its answer. The loop
        answers between two decode steps, or between two forward passes of a scoring, and only if no rank hangs. Any
        thread may call this.

        Returns:
            Seconds since the question that waits for an answer was put; 0.0 if none was waiting.
        """
        with self._changed:
            if self._asked_s is not None:
                return time.monotonic() - self._asked_s
            self._asked_s = time.monotonic()
            self._commands.append({"turn": True})
            self._changed.notify()
            return 0.0

    @property
    def texts(self) -> int:
        """Number of sequences that wait or are being generated."""
        return len(self._texts)

    def submit(self, texts: list[LiveText]) -> list[int]:
        """Queue sequences to be generated, either all of them or none.

        Any thread of rank 0 may call this.

        Args:
            texts: the sequences, each with a `watch` and an `on_event`.

        Returns:
            The sequences' ids, in order, for `cancel`.

        Raises:
            Busy: more sequences would wait than `max_waiting`.
            Closing: the server is ending, or its engine has failed.
        """
        with self._changed:
            self._check_open()
            if len(self._texts) + len(texts) > self.max_texts:
                raise Busy
            ids = [*range(self._next_id, self._next_id + len(texts))]
            self._next_id += len(texts)
            for number, text in zip(ids, texts, strict=True):
                self._texts[number] = text
                self._commands.append({"submit": number, "spec": text.spec})
            self._changed.notify()
        return ids

    def cancel(self, number: int, num_tokens: int | None = None) -> None:
        """End a sequence before the next decode step; nothing happens if it has already ended.

        Any thread may call this.

        Args:
            number: id of the sequence, from `submit`.
            num_tokens: how many of the tokens that this server generated are kept as the text, from the first one on;
                None: all.
        """
        with self._changed:
            if number in self._texts:
                self._commands.append({"cancel": number, "num_tokens": num_tokens})
                self._changed.notify()

    def score(self, scoring: Scoring) -> None:
        """Queue a prompt whose tokens' log probabilities are computed between two decode steps.

        Any thread may call this. The scoring's `on_done` gets the result.

        Args:
            scoring: the prompt, and the function to call with its log probabilities.

        Raises:
            Busy: too many scorings are waiting already.
            Closing: the server is ending, or its engine has failed.
        """
        with self._changed:
            self._check_open()
            if len(self._scorings) >= self.max_texts:
                raise Busy
            self._scorings.append(scoring)
            self._changed.notify()

    def run(self) -> None:
        """Run the loop on the calling thread until rank 0 closes it or something fails.

        The loop takes rank 0's commands, runs a decode step, and so on.
        """
        try:
            busy = False
            while not (self._ended or self.failure):
                for command in self._next_commands(busy):
                    self._apply(command)
                self._score_prompt()
                busy = self.engine.step()
                self._report_ended()
        except BaseException as error:
            self.fail(error)

    def _check_open(self) -> None:
        if not self.takes_texts:
            raise Closing

    def _next_commands(self, busy: bool) -> Commands:
        """What to do before the next step, on every rank alike; rank 0 waits for it while no text takes steps."""
        commands: Commands = []
        if self.context.is_main:
            with self._changed:
                while not (busy or self._commands or self._scorings or self._closing):
                    if not self._changed.wait(None if self.context.alone else HEARTBEAT_S):
                        break
                commands = [*self._commands]
                self._commands.clear()
                if self._closing and not (self._texts or self._scorings or commands):
                    commands.append({"end": True})
        if self.context.alone:
            return commands
        sent = json.dumps(commands, default=TextSpec.as_data) if commands else ""
        shared = self.context.share_text(sent, "waiting for texts")
        return json.loads(shared or "[]")

    def _apply(self, command: dict[str, Any]) -> None:
        if "submit" in command:
            number = command["submit"]
            if not self.context.is_main:
                self._texts[number] = LiveText(TextSpec.of(command["spec"]))
            self._begin(number, self._texts[number])
        elif "cancel" in command:
            text = self._texts.get(command["cancel"])
            if text and text.handle:
                self.engine.cancel(text.handle, command["num_tokens"])
        elif "abandon" in command:
            for number, text in [*self._texts.items()]:
                if text.handle:
                    self.engine.cancel(text.handle)
                self._end(number, text, Ending(error=Abandoned()))
            self._end_scorings(Abandoned())
        elif "turn" in command:
            self._took_turn()
        else:
            self._ended = True

    def _took_turn(self) -> None:
        self._asked_s = None

    def _begin(self, number: int, text: LiveText) -> None:
        try:
            arguments = text.spec.arguments(self.grammars)
            on_tokens = None
            if text.watch:
                on_tokens = lambda tokens, step: self._on_tokens(number, text, tokens)  # noqa: E731
            text.handle = self.engine.submit(**arguments, on_tokens=on_tokens)
        except UserError as error:  # on every rank: they check the same
            self._end(number, text, Ending(error=error))
            return
        if text.spec.logprobs is not None:
            text.handle.request.sampler = LogprobSampler(text.handle.request.sampler, text.spec.logprobs)
        if text.watch and text.spec.resumed:
            self._on_tokens(number, text, text.spec.resumed)

    def _on_tokens(self, number: int, text: LiveText, tokens: list[int]) -> None:
        """A step of a text, on the thread that runs it."""
        assert text.watch and text.handle and text.on_event
        before, thought_before = text.watch.num_tokens, text.watch.num_thought
        shown = text.watch.push(tokens)
        kept = tokens[: text.watch.num_tokens - before]
        logprobs: list[Logprob] = []
        sampler = text.handle.request.sampler
        if isinstance(sampler, LogprobSampler):
            logprobs = sampler.recorded[: len(kept)]
            sampler.recorded.clear()
        num_thought = text.watch.num_thought - thought_before
        text.on_event(Piece(shown, kept, logprobs, text.watch.thought(), num_thought))
        if text.watch.ended:
            self.cancel(number, max(text.watch.num_tokens - len(text.spec.resumed), 0))

    def _report_ended(self) -> None:
        for number, text in [*self._texts.items()]:
            handle = text.handle
            if handle and handle.done:
                self._end(number, text, self._ending(text, handle))

    def _ending(self, text: LiveText, handle: Handle) -> Ending:
        output = handle.output
        if output is None:
            return Ending(error=handle.error)
        watch = text.watch
        return Ending(
            reason="stop_string" if watch and watch.ended else output.finish_reason,
            text=watch.flush() if watch else "",
            thought=watch.thought() if watch else "",
            found=watch.found if watch else None,
            num_tokens=watch.num_tokens if watch else len(text.spec.resumed) + len(output.tokens),
            num_thought=watch.num_thought if watch else 0,
            resumed=len(text.spec.resumed),
            sequence=text.spec.sequence,
            prompt_tokens=len(text.spec.prompt),
            cached=min(handle.reused, len(text.spec.prompt)),
            steps=output.step_stats,
            prefill_s=output.prefill_s,
            decode_s=output.decode_s,
            predicted=output.accepted_prediction,
        )

    def _end(self, number: int, text: LiveText, ending: Ending) -> None:
        with self._changed:
            ended_before = self._texts.pop(number, None) is None  # by `fail`, on another thread
        if text.on_event and not ended_before:
            text.on_event(ending)

    def _score_prompt(self) -> None:
        """Compute the log probabilities of one prompt alone, as the texts that take steps wait for it."""
        with self._changed:
            scoring = self._scorings.popleft() if self._scorings else None
            if not (scoring and scoring.wanted):
                return
            self._scoring = scoring
        result: list[Logprob] | BaseException
        try:
            result = prompt_logprobs(self.decoder, scoring.prompt, scoring.num_top, self._took_turn)
        except Exception as error:
            result = error
        with self._changed:
            ended_before = self._scoring is None  # by `fail`, on another thread
            self._scoring = None
        if not ended_before:
            scoring.on_done(result)

    def _end_scorings(self, error: BaseException) -> None:
        """Tell all who wait for the log probabilities of a prompt that they do not come."""
        with self._changed:
            scorings = [*self._scorings] if self._scoring is None else [self._scoring, *self._scorings]
            self._scoring = None
            self._scorings.clear()
        for scoring in scorings:
            scoring.on_done(error)

    def fail(self, error: BaseException) -> None:
        """Mark the engine as failed: end all sequences and prompt scorings with an error, and call `on_failure`.

        Any thread may call this.

        Args:
            error: why the engine can't continue; the first such error is kept as `failure`.
        """
        with self._changed:
            self.failure = self.failure or error
        for number, text in [*self._texts.items()]:
            self._end(number, text, Ending(error=error))
        self._end_scorings(error)
        self.on_failure()
