"""A history: texts that were generated before, in indexes that find where the end of a text came in them.

The index of most texts is made anew in a thread of its own as texts come; a small one, of the newest texts, is made
where a text begins. When each takes the other's place follows from the texts alone: so it does on every rank alike,
whichever is faster.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from lp.digest import chain_digest
from lp.draft.pool.corpus import MAX_MATCH
from lp.draft.pool.corpus_file import UNLISTED, new_file
from lp.draft.pool.history_file import HistoryFile, newest

MOST_TOKENS = 1 << 20  # of a history; the oldest texts leave
RECENT_TOKENS = 1 << 13  # after so many new ones the large index is made anew


class History:
    """Texts that were generated before, for the pools of texts to come.

    Args:
        vocabulary_size: V.
        texts: tokens of each text that there has been, int32, the oldest first.
        file: where this rank writes each text; None on the other ranks.
        thread: makes the large indexes.
        most_tokens: tokens of the newest texts that stay.
        recent_tokens: after so many new ones the large index is made anew.

    Attributes:
        digest: stands for all texts and whether they have an index; ranks compare it.
    """

    def __init__(
        self,
        vocabulary_size: int,
        texts: Sequence[np.ndarray] = (),
        file: HistoryFile | None = None,
        thread: ThreadPoolExecutor | None = None,
        most_tokens: int = MOST_TOKENS,
        recent_tokens: int = RECENT_TOKENS,
    ) -> None:
        self._vocabulary_size = vocabulary_size
        self._file = file
        self._most_tokens = most_tokens
        self._recent_tokens = recent_tokens
        self._texts = [*texts]
        self.digest = chain_digest(0, *self._texts)
        self._large = self._index(self._texts)
        self._small: np.ndarray | None = None  # to be made where it is needed
        self._recent: list[np.ndarray] = []  # texts that the large index lacks
        self._next_lacks: list[np.ndarray] = []  # texts that the next large one will lack
        self._next: Future[np.ndarray | None] | None = None
        self._thread = thread or ThreadPoolExecutor(1)

    @property
    def indexes(self) -> list[np.ndarray]:
        """Arrays of corpora that together have all texts, the newest first."""
        if self._small is None and self._recent:
            self._small = self._index(self._recent)
        return [index for index in (self._small, self._large) if index is not None]

    def add(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Remember a text that has ended; every rank adds the same texts in the same order.

        Args:
            prompt: what stood before it, of which the end is remembered too: what the text's first tokens follow.
            tokens: what was generated.
        """
        if not tokens:
            return
        text = np.array([*prompt[-MAX_MATCH:], *tokens], np.int32)
        self.digest = chain_digest(self.digest, text)
        self._texts.append(text)
        self._recent.append(text)
        self._next_lacks.append(text)
        self._small = None
        if self._file is not None:
            try:
                self._file.append(text)
            except OSError as error:  # a full disk must not cost the text
                warnings.warn(f"history {self._file.path!r} was not written: {error}", stacklevel=2)
        if sum(map(len, self._next_lacks)) >= self._recent_tokens:
            self._renew()

    def _renew(self) -> None:
        """Take the large index that was begun at the last renewal, and begin one of all texts."""
        if self._next is not None:
            self._large = self._made(self._next)
            self._recent = self._next_lacks
        self._texts = newest(self._texts, self._most_tokens)
        self._next = self._thread.submit(self._index, [*self._texts])
        self._next_lacks = []

    def _made(self, index: Future[np.ndarray | None]) -> np.ndarray | None:
        """An index that the thread has made; None where it could not, until the next renewal: no text must fail for it.

        Ranks that have the index are told of one that has not, by the digest.
        """
        try:
            return index.result()
        except Exception as error:
            warnings.warn(f"older texts of a history draft nothing for now: {error!r}", stacklevel=2)
            self.digest = chain_digest(self.digest, [0])
            return None

    def _index(self, texts: Sequence[np.ndarray]) -> np.ndarray | None:
        """The corpus of some texts; None for no text."""
        return new_file(self._vocabulary_size, texts, UNLISTED) if texts else None
