"""The turns of a chat as the tokens that a model continues, in its chat template or as one plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lp.errors import UserError

from ..text.chat_tokens import chat_tokens
from ..text.image_prompts import ImagePrompt, ImagePrompts, for_template

if TYPE_CHECKING:
    from PIL.Image import Image


class Turn(NamedTuple):
    """A question and its answer.

    Attributes:
        line: the user's line.
        answer: the model's.
        images: images before the line.
    """

    line: str
    answer: str = ""
    images: Sequence[Image] = ()


@dataclass
class History:
    """A conversation with a model.

    A tokenizer without a chat template belongs to a model that only continues text: there the history is the text so
    far, in which every line of the user begins a new line, and an empty one goes on where the text ended.

    Args:
        tokenizer: the model's tokenizer.
        context: tokens the model can take; None for no limit.
        system: what comes before all turns, and stays.
        turns: what was said, oldest first.
        images: makes prompts with images; None: the model takes none.

    Raises:
        ValueError: the chat template takes no system prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    context: int | None
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    images: ImagePrompts | None = None

    def __post_init__(self) -> None:
        self.prompt(Turn("x"))

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return bool(self.tokenizer.chat_template)

    @property
    def goes_on(self) -> bool:
        """Whether there is a text to continue without another word."""
        return not self.chats and bool(self.turns or self.system)

    def ids(self, line: str) -> list[int]:
        """The conversation's tokens, up to the answer to `line`.

        Raises:
            ValueError: what the chat template has against it.
        """
        return self.prompt(Turn(line)).tokens

    def prompt(self, asked: Turn, skip: int = 0) -> ImagePrompt:
        """The conversation up to the answer to what is asked, without the oldest `skip` turns.

        Raises:
            ValueError: what the chat template, or the processor of images, has against it.
        """
        turns = [*self.turns[skip:], asked]
        if not self.chats:
            return ImagePrompt(list(self.tokenizer(self._text(turns), verbose=False)["input_ids"]), {})
        messages = self._messages(turns)
        try:
            if self.images and (images := [image for turn in turns for image in turn.images]):
                return self.images.prompt(messages, images)
            if self.images and self.images.processor:
                messages = for_template(self.tokenizer, messages)
            return ImagePrompt(chat_tokens(self.tokenizer, messages), {})
        except TemplateError as error:
            remedy = "; leave system out" if self.system is not None else ""
            raise UserError(f"the model's chat template refuses this conversation: {error}{remedy}") from error

    def fit(self, asked: Turn, room: int) -> tuple[ImagePrompt, int]:
        """The chat and what is asked, without the oldest turns if they leave no room for an answer.

        Args:
            asked: a line, and images before it.
            room: tokens the answer may take; more than half the context is not worth a turn.

        Returns:
            The prompt, and how many turns were dropped for good.

        Raises:
            ValueError: not even the last line fits.
        """
        prompt = self.prompt(asked)
        dropped = 0
        if self.context is None:
            return prompt, dropped
        most = self.context - min(room, self.context // 2)
        while len(prompt.tokens) > most and dropped < len(self.turns):
            dropped += 1
            prompt = self.prompt(asked, dropped)
        if (count := len(prompt.tokens)) >= self.context:
            raise UserError(f"your text comes to {count} tokens, the model's context is {self.context}; shorten it")
        del self.turns[:dropped]
        return prompt, dropped

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for turn in turns:
            content: Any = turn.line
            if turn.images:
                content = [*({"type": "image"} for _ in turn.images), {"type": "text", "text": turn.line}]
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
        return messages[:-1]  # the last answer is yet to come

    def _text(self, turns: Sequence[Turn]) -> str:
        text = self.system or ""
        for turn in turns:
            if turn.line and text and not text.endswith("\n"):
                text += "\n"
            text += turn.line + turn.answer
        return text
