"""Log probabilities in the response formats of OpenAI's endpoints.

A token is named by the text that it adds, such as " the". If two tokens at one position would have the same name, one
is called "token_id:123" instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lp.sampling.logprob_sampler import Logprob

from ..text.detokenizer import TokenWalk


class LegacyLogprobs:
    """Collects log probabilities of one text's tokens, for the field `logprobs` of a /v1/completions response.

    Args:
        name: returns the name of a token id that was not generated, but is among the likeliest at a position, such as
            `Vocabulary.name`.
        walk: names the text's own tokens and tells where each begins; its next token must be the first one that is
            added here.
    """

    def __init__(self, name: Callable[[int], str], walk: TokenWalk) -> None:
        self._name = name
        self._walk = walk
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, prompt: Sequence[int], logprobs: Sequence[Logprob], offsets: Sequence[int] | None) -> None:
        """Add a prompt's tokens, for answers that echo the prompt. The first token has no log probability: null.

        Args:
            prompt: token ids of the prompt.
            logprobs: log probabilities of all tokens but the first.
            offsets: number of characters that the prompt's text has before each token (`prompt_offsets`); None: the
                characters are counted in the text that the tokens decode to.
        """
        self._add(prompt[0], None, None)
        self.add(logprobs)
        if offsets is not None:
            self._offsets = [*offsets]

    def add(self, logprobs: Sequence[Logprob]) -> None:
        """Add the next tokens of the text, with their log probabilities.

        Args:
            logprobs: the tokens with their log probabilities, in order.
        """
        for each in logprobs:
            self._add(each.token, each.logprob, each)

    def _add(self, token: int, value: float | None, logprob: Logprob | None) -> None:
        name, _, offset = self._walk.add(token)
        self._tokens.append(name)
        self._values.append(value)
        self._tops.append(None if logprob is None else self._top(logprob, name))
        self._offsets.append(offset)

    def _top(self, logprob: Logprob, own: str) -> dict[str, float]:
        """The likeliest tokens and the text's own, which has its name before others that would have the same."""
        named: dict[str, int] = {own: logprob.token}
        values = dict([*logprob.top, (logprob.token, logprob.logprob)])
        for token in values:
            if token != logprob.token:
                name = self._name(token)
                named[f"token_id:{token}" if name in named else name] = token
        names = {token: name for name, token in named.items()}
        return {names[token]: value for token, value in values.items()}

    def after(self, walk: TokenWalk) -> LegacyLogprobs:
        """Copy this object after a prompt's tokens were added, to add one of several texts that continue the prompt.

        Args:
            walk: names the tokens of that text; its next token must be the first one after the prompt.
        """
        copied = LegacyLogprobs(self._name, walk)
        copied._tokens, copied._values = [*self._tokens], [*self._values]
        copied._tops, copied._offsets = [*self._tops], [*self._offsets]
        return copied

    def data(self) -> dict[str, Any]:
        """Value of the response's field `logprobs`, with all tokens collected so far."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }

    def take(self) -> dict[str, Any]:
        """Value of `logprobs` for the next chunk of a stream: the tokens that were added since the last call."""
        data = self.data()
        self._clear()
        return data


def prompt_offsets(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[int] | None:
    """Find where each token of a prompt begins in the text that the client sent, for `text_offset`.

    Args:
        tokenizer: the model's tokenizer.
        text: the prompt's text.
        ids: token ids that the text was encoded to.

    Returns:
        For each token, the number of characters before it. A token that stands for no text, such as BOS, begins where
        the token before it ends. None if the tokenizer is not a fast one, or does not encode `text` to `ids`.
    """
    if not tokenizer.is_fast:
        return None
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    if list(encoded["input_ids"]) != [*ids]:
        return None
    offsets: list[int] = []
    end = 0
    for start, stop in encoded["offset_mapping"]:
        offsets.append(min(start, end) if stop > start else end)  # some tokenizers leave spaces out
        end = max(end, stop)
    return offsets


def chat_logprobs(name: Callable[[int], str], walk: TokenWalk, logprobs: Sequence[Logprob]) -> dict[str, Any]:
    """Convert log probabilities of generated tokens to the field `logprobs` of a /v1/chat/completions response.

    Args:
        name: returns the name of a token id that was not generated, but is among the likeliest at a position, such as
            `Vocabulary.name`.
        walk: names the text's own tokens; its next token must be the first one of `logprobs`. Afterwards its next token
            is the one after the last.
        logprobs: log probabilities of the next tokens of the text, in order.
    """

    def data(name: str, data: bytes | None, value: float) -> dict[str, Any]:
        return {"token": name, "logprob": value, "bytes": None if data is None else [*data]}

    content = []
    for each in logprobs:
        own = walk.add(each.token)
        top = [
            data(own.name, own.data, value)
            if token == each.token
            else data(name(token), walk.vocabulary.data(token), value)
            for token, value in each.top
        ]
        content.append({**data(own.name, own.data, each.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}
