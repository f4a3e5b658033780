"""Drafting from a predicted text: tokens that the caller expects, such as the old text of a file to be edited."""

from __future__ import annotations

from collections.abc import Sequence

from lp.draft.path_first import paying_length, share_with_path
from lp.draft.share import Share
from lp.draft.source import DraftSource, ShareInput
from lp.draft.wrapping import WrappingSource
from lp.sampling.grammar import common_length

MATCHED_TOKENS = 3  # a run of so many finds the place in the prediction again, once the text has left it


class Prediction(WrappingSource):
    """Wraps another draft source: first drafts the next tokens of a predicted text, then what the source drafts.

    Where the generated text leaves the prediction, drafting goes on as soon as the text's last 3 tokens occur in the
    prediction again, behind them.

    Args:
        inner: the wrapped source.
        tokens: token ids of the predicted text.
        prompt_tokens: length of the prompt, behind which the prediction is expected.

    Attributes:
        accepted_prediction: tokens of the prediction that were accepted as draft tokens.
    """

    def __init__(self, inner: DraftSource, tokens: Sequence[int], prompt_tokens: int) -> None:
        super().__init__(inner)
        self.accepted_prediction = 0
        self._tokens = list(tokens)
        self._next: int | None = 0  # index of the predicted next token; None where the text has left the prediction
        self._left_at = 0  # index at which the text last left the prediction
        self._seen = prompt_tokens
        self._path: list[int] = []  # drafted in the last step
        self._places: dict[tuple[int, ...], list[int]] = {}  # run of MATCHED_TOKENS -> the indices behind it
        for end in range(MATCHED_TOKENS, len(self._tokens) + 1):
            self._places.setdefault(tuple(self._tokens[end - MATCHED_TOKENS : end]), []).append(end)

    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """One rank's share of the draft tree; rank 0 has the prediction's next tokens before the wrapped source's.

        Args:
            text: prompt and generated tokens.
            step: the rank, its room for draft tokens, and their price.
        """
        self.follow(text)
        self._path = []
        if self._next is not None:
            ahead = self._tokens[self._next : self._next + max(int(step.rooms[0]), 0)]
            probs = [self.added_prob**depth for depth in range(1, len(ahead) + 1)]
            self._path = ahead[: paying_length(step, probs)]
            return share_with_path(self._propose_inner, text, step, self._path, probs[: len(self._path)])
        return self._propose_inner(text, step)

    def follow(self, text: Sequence[int]) -> None:
        """Find the place in the prediction behind the text's new tokens, and count accepted draft tokens."""
        new = text[self._seen :]
        if not new:
            return
        self._seen = len(text)
        if self._path:
            same = common_length(self._path, new)
            self.accepted_prediction += same
            self.count(same, min(same + 1, len(self._path)))
            self._path = []
        if self._next is not None:
            same = common_length(self._tokens[self._next : self._next + len(new)], new)
            self._next += same
            if same == len(new) or self._next == len(self._tokens):
                return
            self._left_at, self._next = self._next, None
        places = self._places.get(tuple(text[-MATCHED_TOKENS:]), [])
        behind = [place for place in places if place >= self._left_at]
        if places:
            self._next = behind[0] if behind else places[-1]
