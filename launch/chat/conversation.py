"""The loop of `lp chat`: each line that is read is a command, such as /set, or a message that the model answers."""

from __future__ import annotations

import base64
import json
import re
import signal
import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import lp
from lp.engine.decoder import Decoder
from lp.engine.interrupts import DeferredSignals
from lp.errors import UserError
from lp.models.loader import Loaded, context_limit
from lp.sampling.grammar import Grammar

from ..bench.totals import Total
from ..config.builders import decoder_builders
from ..config.sampling import describe_sampling
from ..config.schema import ChatConfig
from ..data.images import MOST_PIXELS, decoded
from ..running.errors import explain
from ..running.once import on_rank_0
from ..running.session import check_common, grammar_of, on_main, open_model, say_how_it_runs, schema_text
from ..text.image_prompts import ImagePrompts
from ..text.stream import Pen, show, shows_colours
from .history import History, Turn
from .keyboard import Keyboard
from .settings import Settings

if TYPE_CHECKING:
    from PIL.Image import Image

COMMAND = re.compile(r"/\w")
HELP = '''\
/set temperature=0.8 top_p=0.95   sample; /set temperature=0 is greedy again; /set alone shows all settings
/image FILE                       add an image to the next message
/reset                            forget the conversation
/stats                            tokens, steps and speed of all answers
/help                             this list
/exit, Ctrl-D                     leave
Ctrl-C stops an answer; its text so far remains. A pasted block is one message, up to Enter; """ begins and ends a text
of several lines that is typed.
'''
# How an answer ended, where that is worth a word.
ENDINGS = {
    "interrupted": "stopped by Ctrl-C",
    "length": "cut at max_new_tokens",
    "context": "cut: the model's context is full",
}


NOTHING = Total(method="chat")


def figures(total: Total) -> str:
    """One line with tokens, decode steps, S (generated tokens per step) and speed, for each answer and for /stats.

    Args:
        total: the totals of one answer or of several.
    """
    speed = f"S {total.compression:.2f}, {total.tokens_per_s:.1f} tokens/s"
    return f"{total.tokens} tokens, {total.steps} steps, {speed}"


@dataclass(kw_only=True)
class Chat:
    """A running chat: reads lines, obeys commands, answers messages. Every rank has one, and all do the same.

    Args:
        config: the config, as the user gave it.
        context: this rank's context.
        loaded: model and tokenizer.
        decoder: generates the answers.
        history: the turns so far.
        settings: how to sample the next answer; /set changes it.
        keyboard: source of the lines on rank 0; None on other ranks.
        pen: writes answers and remarks on rank 0; on other ranks it shows nothing.
        grammar: grammar that every answer follows; None: answers follow no grammar.
        totals: totals of all answers, for /stats.
        images: images that /image has added to the next message.
        ended: whether the chat is over: /exit, or the end of the input.
    """

    config: ChatConfig
    context: lp.ParallelContext
    loaded: Loaded
    decoder: Decoder
    history: History
    settings: Settings
    keyboard: Keyboard | None
    pen: Pen
    grammar: Grammar | None = None
    totals: Total = NOTHING
    images: list[Image] = field(default_factory=list)
    ended: bool = False

    def run(self) -> None:
        """Greet the user, then read lines and act on each, until the input ends or the user types /exit."""
        self._greet()
        while not self.ended:
            line = self.context.share_text(self.keyboard.read() if self.keyboard else None, "waiting for a line")
            with DeferredSignals() as held:  # Ctrl-C beside an answer must not take a rank out of step with the others
                self._do(line)
            if held.received == signal.SIGTERM:
                signal.raise_signal(signal.SIGTERM)

    def _greet(self) -> None:
        model, ranks = self.loaded.model, self.context.world_size
        size = f"{model.num_parameters() / 1e6:.1f} M parameters"
        decoder = f"{self.config.decoder.name}, {describe_sampling(self.settings.chosen)}"
        self._say(f"model {self.config.model.name} ({size}), {decoder}, ranks: {ranks}; /help lists the commands")
        if not self.history.chats:
            self._say("no chat template: your lines and the answers are one text, which the model continues")
        self.pen.legend()

    def _do(self, line: str | None) -> None:
        if line is None:
            self.ended = True
            return
        try:
            if COMMAND.match(line) and "\n" not in line:
                self._command(line)
            elif line.strip() or self.history.goes_on:
                self._answer(line)
        except UserError as error:
            if self.context.is_main:
                print(f"error: {explain(error)}", file=sys.stderr, flush=True)

    def _command(self, line: str) -> None:
        name, rest, *_ = [*line.split(maxsplit=1), ""]
        if name == "/set":
            self.settings = self.settings.changed(rest.split())
            self._say(str(self.settings))
        elif name == "/reset":
            self.history.turns.clear()
            self.images.clear()
            self._say("the conversation is forgotten")
        elif name == "/stats":
            used = len(self.history.ids(""))
            self._say(f"answers: {self.totals.prompts}, {figures(self.totals)}; {self._of_context(used)} of history")
        elif name == "/image":
            self._add_image(rest.strip())
        elif name == "/help":
            self._say(HELP.rstrip())
        elif name in ("/exit", "/quit"):
            self.ended = True
        else:
            raise UserError(f"unknown command {name}; /help lists the commands")

    def _of_context(self, tokens: int) -> str:
        return f"{tokens} tokens" if self.history.context is None else f"{tokens} of {self.history.context} tokens"

    def _add_image(self, path: str) -> None:
        """Read an image file on rank 0, send it to all ranks, and add it to the next message."""
        (self.history.images or ImagePrompts(tokenizer=self.loaded.tokenizer)).check()
        content = on_main(self.context, lambda: base64.b64encode(read_image(path)).decode())
        data = base64.b64decode(self.context.share_text(content, "reading an image") or "")
        room = MOST_PIXELS - sum(image.width * image.height for image in self.images)
        self.images.append(decoded(data, path, room))
        width, height = self.images[-1].size
        self._say(f"{path} ({width} x {height}) goes with your next message")

    def _answer(self, line: str) -> None:
        turn = Turn(line, images=self.images)
        self.images = []
        (ids, inputs), dropped = self.history.fit(turn, self.settings.max_new_tokens)
        if dropped:
            turns = "the oldest turn was" if dropped == 1 else f"the {dropped} oldest turns were"
            self._say(f"{turns} dropped: the model's context is {self.history.context} tokens")
        tokenizer = self.loaded.tokenizer
        generate = partial(
            self.decoder.generate,
            ids,
            self.settings.max_new_tokens,
            self.settings.chosen or (lp.SamplingParams(temperature=0.0) if self.decoder.checkpoint().samples else None),
            eos_token_id=self._ends(),
            stop_strings=self.config.stop_strings,
            tokenizer=tokenizer,
            grammar=self.grammar,
            **inputs,
        )
        try:
            text, output, interruption = show(lambda on_tokens: generate(on_tokens=on_tokens), tokenizer, ids, self.pen)
        except UserError as error:
            self._agree(turn, None, error)
            raise
        self._agree(turn, text if output.tokens else None)
        self.totals = self.totals.plus(output)
        ending = ENDINGS.get(output.finish_reason)
        took = figures(NOTHING.plus(output))
        self._say(f"{took} ({ending})" if ending else took)
        if interruption and interruption.signal == signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)  # which `run` holds

    def _agree(self, turn: Turn, answer: str | None, error: UserError | None = None) -> None:
        """Add the turn to the history with rank 0's answer, on all ranks.

        The ranks' own answers may differ: plain decoding has no exchange, so Ctrl-C stops it on each rank by itself;
        and a rank that failed alone, unknown to the others, goes on beside them.
        """
        ending = json.dumps({"answer": answer, "failed": error is not None})
        of_rank_0 = json.loads(self.context.share_text(ending) or "")
        if of_rank_0["answer"] is not None:
            self.history.turns.append(turn._replace(answer=of_rank_0["answer"]))
        if error and not of_rank_0["failed"]:
            print(f"[rank {self.context.rank}] error: {explain(error)}", file=sys.stderr, flush=True)

    def _ends(self) -> list[int] | None:
        """Tokens that end an answer: the model's EOS tokens, and in a chat the tokenizer's, which may end a turn."""
        own = self.loaded.model.generation_config.eos_token_id
        ends = [own] if isinstance(own, int) else list(own or ())
        extra = self.loaded.tokenizer.eos_token_id if self.history.chats else None
        return [*ends, extra] if isinstance(extra, int) else None

    def _say(self, text: str) -> None:
        self.pen.aside(text + "\n")


def read_image(path: str) -> bytes:
    """The content of an image file that the user has named with /image.

    Args:
        path: the path as typed; ~ stands for the home folder.

    Raises:
        ValueError: no path was typed, or the file can't be read.
    """
    if not path:
        raise UserError("/image has no file; write /image FILE, as in /image photo.jpg")
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); give /image a file with an image") from None


def chat(config: ChatConfig) -> None:
    """Load a model and talk to it until the input ends.

    Args:
        config: this job's config.

    Raises:
        ValueError: a value of the config is wrong, or the model cannot be loaded.
    """
    check_common(config)
    settings, builders = Settings.of(config), decoder_builders(config, [config.decoder.name])
    schema = schema_text(config.json_schema)
    context, loaded = open_model(config)
    say_how_it_runs(context, loaded)
    images = ImagePrompts.of(config.model.name, *loaded, config.model.trust_remote_code)
    history = History(loaded.tokenizer, context_limit(loaded.model), config.system, images=images)
    decoder = builders[config.decoder.name](loaded.model, context)
    decoder.follows = config.generation_config
    settings = settings.or_checkpoint(decoder.checkpoint())
    if not context.is_main and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # between answers Ctrl-C is rank 0's affair
    keyboard = Keyboard(config.history_file) if context.is_main else None
    try:
        with on_rank_0(context, sys.stdout) as file:
            pen = Pen(file, shows_colours(file))
            Chat(
                config=config,
                context=context,
                loaded=loaded,
                decoder=decoder,
                history=history,
                settings=settings,
                keyboard=keyboard,
                pen=pen,
                grammar=grammar_of(schema, loaded),
            ).run()
    finally:
        if keyboard:
            keyboard.close()
