"""A history: texts that were generated earlier, indexed so that later texts can be drafted from them.

There are two indexes. The large one, of most texts, is made again in a background thread whenever enough new texts have
come. The small one, of the newest texts, is made when a text begins. The number of new tokens alone decides when a new
large index is put to use, so all ranks switch to it at the same text, whichever thread is faster.
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

MOST_TOKENS = 1 << 20  # tokens of a history; beyond them the oldest texts are forgotten
RECENT_TOKENS = 1 << 13  # new tokens after which the large index is made again


class History:
    """Remembers generated texts and indexes them, so that n-gram pools can draft later texts from them.

    Every rank has a history with the same texts. Rank 0 also writes them to a file.

    Args:
        vocabulary_size: V, number of tokens in the model's vocabulary.
        texts: token ids of the texts so far, int32, the oldest first.
        file: file to which rank 0 appends each new text; None on the other ranks.
        thread: executor that makes the large index in the background; None: the history starts its own.
        most_tokens: most tokens to remember; the oldest texts beyond this number are forgotten.
        recent_tokens: number of new tokens after which the large index is made again.

    Attributes:
        digest: digest of all texts, changed also when an index could not be made; ranks compare it before each text.
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
        self._small: np.ndarray | None = None  # made when a text needs it
        self._recent: list[np.ndarray] = []  # texts that the large index lacks
        self._next_lacks: list[np.ndarray] = []  # texts that the next large one will lack
        self._next: Future[np.ndarray | None] | None = None
        self._thread = thread or ThreadPoolExecutor(1)

    @property
    def indexes(self) -> list[np.ndarray]:
        """Indexes from which the next text is drafted: an index of the newest texts (if any), then the large index.

        Each is the int64 array of a corpus (see `lp.draft.pool.corpus_file`). Together they contain all remembered
        texts.
        """
        if self._small is None and self._recent:
            self._small = self._index(self._recent)
        return [index for index in (self._small, self._large) if index is not None]

    def add(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Remember a text that has ended; every rank must add the same texts in the same order.

        Args:
            prompt: token ids of the prompt; only its last MAX_MATCH tokens are remembered, as the context of the first
                generated token.
            tokens: token ids that were generated; if there are none, nothing is remembered.
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
        """Use the large index that was begun at the last renewal, and begin the next, of all texts, in the thread."""
        if self._next is not None:
            self._large = self._made(self._next)
            self._recent = self._next_lacks
        self._texts = newest(self._texts, self._most_tokens)
        self._next = self._thread.submit(self._index, [*self._texts])
        self._next_lacks = []

    def _made(self, index: Future[np.ndarray | None]) -> np.ndarray | None:
        """Wait for a large index; None if it could not be made: older texts then draft nothing until the next renewal.

        In that case the digest changes too, so that ranks which have the index notice.
        """
        try:
            return index.result()
        except Exception as error:
            warnings.warn(f"older texts of a history draft nothing for now: {error!r}", stacklevel=2)
            self.digest = chain_digest(self.digest, [0])
            return None

    def _index(self, texts: Sequence[np.ndarray]) -> np.ndarray | None:
        """Index some texts, as the array of a corpus; None if there are no texts."""
        return new_file(self._vocabulary_size, texts, UNLISTED) if texts else None
