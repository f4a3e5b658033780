"""The turns of a chat, and the prompt that they make: in the model's chat template, or without one as plain text."""

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
    """A message of the user and the model's answer to it.

    Attributes:
        line: the user's message.
        answer: the model's answer; empty while it is yet to come.
        images: images that go before the message.
    """

    line: str
    answer: str = ""
    images: Sequence[Image] = ()


@dataclass
class History:
    """The conversation so far, from which the prompt for the next answer is made.

    A model whose tokenizer has no chat template only continues text. For it the prompt is the system text and all
    messages and answers in a row, each message on a new line. An empty message then makes the model continue its last
    answer.

    Args:
        tokenizer: the model's tokenizer.
        context: most tokens that the model can take; None for no limit.
        system: system prompt, which stays when old turns are dropped; None: no system prompt.
        turns: the turns so far, oldest first.
        images: turns prompts with images into the model's inputs; None for a model that takes no images.

    Raises:
        ValueError: the chat template refuses a conversation, such as one with a system prompt.
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
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    @property
    def goes_on(self) -> bool:
        """Whether an empty message makes the model continue: there is text to continue, and no chat template."""
        return not self.chats and bool(self.turns or self.system)

    def ids(self, line: str) -> list[int]:
        """Token ids of the prompt for the next answer, from all turns and the new message.

        Args:
            line: the new message.

        Raises:
            ValueError: the chat template refuses this conversation.
        """
        return self.prompt(Turn(line)).tokens

    def prompt(self, asked: Turn, skip: int = 0) -> ImagePrompt:
        """The prompt for the next answer: token ids, and the model's inputs for images.

        Args:
            asked: the new message, with its images.
            skip: how many of the oldest turns to leave out.

        Raises:
            ValueError: the chat template or the image processor refuses this conversation.
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
        """The prompt for the next answer; the oldest turns are dropped until it leaves room for the answer.

        Args:
            asked: the new message, with its images.
            room: most tokens of the answer; at most half the context is kept free for it.

        Returns:
            The prompt, and how many turns the history has lost for good.

        Raises:
            ValueError: the new message alone does not fit the context.
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
