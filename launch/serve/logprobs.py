"""Log probabilities as OpenAI's clients read them: a token by the text that it adds, two tokens never by one name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lp.sampling.logprob_sampler import Logprob

from ..text.detokenizer import TokenWalk


class LegacyLogprobs:
    """Log probabilities in the form of /v1/completions.

    Args:
        name: what a token is called where others come before it.
        walk: the text that the tokens are of.
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
        """The tokens of a prompt, of which the first has no probability.

        Args:
            prompt: token ids.
            logprobs: log probabilities of all tokens but the first.
            offsets: where each token begins in the text as it was sent; None where that is the text that the tokens
                give.
        """
        self._add(prompt[0], None, None)
        self.add(logprobs)
        if offsets is not None:
            self._offsets = [*offsets]

    def add(self, logprobs: Sequence[Logprob]) -> None:
        """Add more tokens with their log-probabilities."""
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

    def behind(self, walk: TokenWalk) -> LegacyLogprobs:
        """A copy of these tokens, with room for those of a text behind them."""
        copied = LegacyLogprobs(self._name, walk)
        copied._tokens, copied._values = [*self._tokens], [*self._values]
        copied._tops, copied._offsets = [*self._tops], [*self._offsets]
        return copied

    def data(self) -> dict[str, Any]:
        """All of them, as the field `logprobs` has them."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }

    def take(self) -> dict[str, Any]:
        """Log probabilities that have come since the last call."""
        data = self.data()
        self._clear()
        return data


def prompt_offsets(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[int] | None:
    """Where the tokens of a text begin in it, as it was sent; None where the tokenizer does not tell.

    A token that stands for nothing in the text, as BOS, begins where the one before it ends.
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
    """Log probabilities in the form of /v1/chat/completions.

    Args:
        name: what a token is called where others come before it.
        walk: the text that the tokens are of, up to them.
        logprobs: log probabilities of the tokens.
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
