"""The turns of a chat as the tokens that a model continues, in its chat template or as one plain text."""

from __future__ import annotations

from dataclasses import dataclass, field

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lp.errors import UserError

from ..text.chat_tokens import chat_tokens


@dataclass
class History:
    """A conversation with a model.

    A tokenizer without a chat template belongs to a model that only continues text: there the history is the text so
    far, in which every line of the user begins a new line, and an empty one goes on where the text ended.

    Args:
        tokenizer: the model's tokenizer.
        context: tokens the model can take; None for no limit.
        system: what comes before all turns, and stays.
        turns: (the user's line, the model's answer), oldest first.

    Raises:
        ValueError: the chat template takes no system prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    context: int | None
    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids("x")

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return bool(self.tokenizer.chat_template)

    @property
    def goes_on(self) -> bool:
        """Whether there is a text to continue without another word."""
        return not self.chats and bool(self.turns or self.system)

    def ids(self, line: str, skip: int = 0) -> list[int]:
        """The conversation's tokens, up to the answer to `line`, without the oldest `skip` turns.

        Raises:
            ValueError: what the chat template has against it.
        """
        if not self.chats:
            return list(self.tokenizer(self._text(line, skip), verbose=False)["input_ids"])
        try:
            return chat_tokens(self.tokenizer, self._messages(line, skip))
        except TemplateError as error:
            remedy = "; leave system out" if self.system is not None else ""
            raise UserError(f"the model's chat template refuses this conversation: {error}{remedy}") from error

    def fit(self, line: str, room: int) -> tuple[list[int], int]:
        """Tokens of the chat and a line, without the oldest turns if they leave no room for an answer.

        Args:
            line: the user's.
            room: tokens the answer may take; more than half the context is not worth a turn.

        Returns:
            The tokens, and how many turns were dropped for good.

        Raises:
            ValueError: not even the last line fits.
        """
        ids = self.ids(line)
        dropped = 0
        if self.context is None:
            return ids, dropped
        most = self.context - min(room, self.context // 2)
        while len(ids) > most and dropped < len(self.turns):
            dropped += 1
            ids = self.ids(line, dropped)
        if len(ids) >= self.context:
            raise UserError(f"your text comes to {len(ids)} tokens, the model's context is {self.context}; shorten it")
        del self.turns[:dropped]
        return ids, dropped

    def _messages(self, line: str, skip: int) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for question, answer in self.turns[skip:]:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": line}]

    def _text(self, line: str, skip: int) -> str:
        text = self.system or ""
        for question, answer in [*self.turns[skip:], (line, "")]:
            if question and text and not text.endswith("\n"):
                text += "\n"
            text += question + answer
        return text
