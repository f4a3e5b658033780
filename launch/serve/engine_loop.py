"""The thread that runs an engine: it takes texts from the endpoints, steps while there are any, and reports.

Among ranks, rank 0 takes the texts and sends every command to the others before the step that it belongs to, so that
all make the same calls in the same order. Between two commands only the engine itself decides.
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
    """There are as many texts as the server takes; try again later."""


class Closing(Exception):
    """The server takes no more texts: it ends, or its engine has failed."""


class Abandoned(Exception):
    """The server ended before the text did."""


class Piece(NamedTuple):
    """What one step brought to a text.

    Attributes:
        text: the characters that may be shown.
        tokens: tokens that the step added, up to the one that ends the text.
        logprobs: log probabilities of these tokens, if asked for.
        thought: characters of the reasoning before the text.
        num_thought: how many of the tokens are the reasoning's, those around it included.
    """

    text: str
    tokens: list[int]
    logprobs: list[Logprob]
    thought: str = ""
    num_thought: int = 0


class Ending(NamedTuple):
    """How a text ended.

    Attributes:
        reason: what the engine says, "stop_string" where the client's stop strings or limits ended it, or "cancelled".
        text: the characters that were held back.
        thought: characters of the reasoning that were held back.
        found: the stop string that ended it, if one did.
        num_tokens: tokens of the text up to its end, resumed ones included.
        num_thought: how many of them are the reasoning's, where it is told apart.
        resumed: how many of these tokens a server before this one generated.
        sequence: index of the text among the choices of its prompt.
        prompt_tokens: how many tokens the prompt has.
        cached: how many of the prompt's tokens were cached before.
        steps: steps that the text took part in.
        prefill_s, decode_s: seconds before its first step, and from there on.
        predicted: draft tokens of the predicted output that were accepted.
        error: what it failed with.
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
        """How many tokens steps have generated, without those that a journal had."""
        return max(self.num_tokens - self.resumed, 0)


Event = Piece | Ending
Commands = list[dict[str, Any]]


@dataclass(eq=False)
class LiveText:
    """A text that the engine generates, as its client sees it.

    Args:
        spec: what it is generated from.
        watch: decodes it; None on ranks that show nothing.
        on_event: is told of every step and of the end, on the engine's thread.
        handle: what the engine knows the text by.
    """

    spec: TextSpec
    watch: TextWatch | ReasoningWatch | None = None
    on_event: Callable[[Event], None] | None = None
    handle: Handle | None = None


@dataclass(eq=False)
class Scoring:
    """Log probabilities of a prompt, which rank 0 alone computes.

    Args:
        prompt: token ids.
        num_top: likeliest tokens beside each.
        on_done: is given them, or what failed.
        wanted: somebody still waits for them.
    """

    prompt: list[int]
    num_top: int
    on_done: Callable[[list[Logprob] | BaseException], None]
    wanted: bool = True


class EngineLoop:
    """Runs an engine on a thread of its own; on other ranks than 0, on the thread that calls `run`.

    Args:
        engine: nobody else may use it.
        grammars: compiles those of texts that follow one.
        max_waiting: texts that may wait beside those that take steps.
        on_failure: called when the engine can't go on, on the thread that finds it out.

    Attributes:
        failure: why the engine can't go on; None while it can.
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
        """Run the loop on a thread of its own."""
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the texts that there are, take no others, and end; on all ranks.

        Args:
            timeout_s: seconds to wait for the end; None: as long as it takes.

        Returns:
            Whether it has ended.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    @property
    def takes_texts(self) -> bool:
        """Whether `submit` takes another text now."""
        return not (self._closing or self.failure)

    def abandon(self) -> None:
        """End the texts that there are, before the next step. From any thread, after `close`."""
        with self._changed:
            self._commands.append({"abandon": True})
            self._changed.notify()

    def silent_s(self) -> float:
        """Ask the loop for a turn; seconds since it was asked for one that it has not taken yet, 0 where it has.

        A turn is one of all ranks: a rank that hangs keeps the others from theirs. So is a pass over a part of a prompt
        whose log probabilities are asked for, which may be so long that no turn comes for minutes. From any thread.
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
        """How many texts have not ended."""
        return len(self._texts)

    def submit(self, texts: list[LiveText]) -> list[int]:
        """Add texts, all or none; their ids, for `cancel`. From any thread.

        Raises:
            Busy: so many would wait that these are not taken.
            Closing: the server ends.
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
        """End a text before the next step. Nothing happens if it has ended. From any thread.

        Args:
            number: its id.
            num_tokens: how many of the tokens that steps have generated its client wants; None: all.
        """
        with self._changed:
            if number in self._texts:
                self._commands.append({"cancel": number, "num_tokens": num_tokens})
                self._changed.notify()

    def score(self, scoring: Scoring) -> None:
        """Compute the log probabilities of a prompt, between two steps. From any thread.

        Raises:
            Busy: so many wait that this one is not taken.
            Closing: the server ends.
        """
        with self._changed:
            self._check_open()
            if len(self._scorings) >= self.max_texts:
                raise Busy
            self._scorings.append(scoring)
            self._changed.notify()

    def run(self) -> None:
        """Do what rank 0 is asked for, and step, until rank 0 is closed or something fails."""
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
        """The engine can't go on: tell all who wait. From any thread."""
        with self._changed:
            self.failure = self.failure or error
        for number, text in [*self._texts.items()]:
            self._end(number, text, Ending(error=error))
        self._end_scorings(error)
        self.on_failure()
