"""Drafting from a predicted text: tokens that the caller expects, such as the old version of a file to be edited."""

from __future__ import annotations

from collections.abc import Sequence

from lp.draft.path_first import paying_length, share_with_path
from lp.draft.share import Share
from lp.draft.source import DraftSource, ShareInput
from lp.draft.wrapping import WrappingSource
from lp.sampling.grammar import common_length

MATCHED_TOKENS = 3  # a run of so many finds the place in the prediction again, once the text has left it


class Prediction(WrappingSource):
    """Wraps another draft source: drafts the next tokens of a predicted text, then what the other source proposes.

    If the generated text departs from the predicted text, drafting continues once the last 3 generated tokens occur in
    the predicted text again: the tokens after this place are drafted next.

    Args:
        inner: the wrapped draft source.
        tokens: token ids of the predicted text.
        prompt_tokens: number of prompt tokens; the predicted text is expected right after the prompt.

    Attributes:
        accepted_prediction: number of draft tokens from the predicted text that were accepted.
    """

    def __init__(self, inner: DraftSource, tokens: Sequence[int], prompt_tokens: int) -> None:
        super().__init__(inner)
        self.accepted_prediction = 0
        self._tokens = list(tokens)
        self._next: int | None = 0  # index of the predicted next token; None where the text has left the prediction
        self._left_at = 0  # index at which the text last left the prediction
        self._seen = prompt_tokens
        self._path: list[int] = []  # drafted in the last step
        self._places: dict[tuple[int, ...], list[int]] = {}  # run of MATCHED_TOKENS -> the indices right after it
        for end in range(MATCHED_TOKENS, len(self._tokens) + 1):
            self._places.setdefault(tuple(self._tokens[end - MATCHED_TOKENS : end]), []).append(end)

    def propose_share(self, text: Sequence[int], step: ShareInput) -> Share:
        """Propose one rank's part of the draft tree; rank 0 drafts the predicted text's next tokens first.

        The rest of the tree comes from the wrapped draft source.

        Args:
            text: token ids of the prompt and the generated tokens.
            step: how many draft tokens each rank may compute, and what they cost.
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
        """Find where the predicted text continues after the newly generated tokens, and count accepted draft tokens.

        Args:
            text: token ids of the prompt and the generated tokens.
        """
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
