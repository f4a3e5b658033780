"""The corpora of a pool, as their files are when a text begins: a text keeps to what it began with.

A corpus may have a delta beside it, FILE.delta, which `lp corpus watch` writes: a small corpus of the files that have
changed since. Each stands for the corpus' file of the same path, whose tokens are gone; a file that was deleted has no
tokens in the delta. A delta is of one corpus: beside another one, it is left out.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import numpy as np

from lp.digest import chain_digest
from lp.draft.pool.corpus import Corpus
from lp.draft.pool.corpus_file import (
    UNLISTED,
    FileState,
    contents_of,
    delta_path,
    digest_of,
    identity_of,
    listing_of,
    new_file,
    read_file,
    spans_of,
    state_of,
)
from lp.draft.registry import CallInfo
from lp.errors import UserError

UNREADABLE = -1  # no digest is negative
LOOKS = 3  # of ranks that have nothing yet, while files change
PAUSE_S = 0.05  # between them


class FollowedCorpora:
    """What all ranks take from their files, each time a text begins.

    Where ranks have read different things, since files have changed in between or some rank's can't be read, all stay
    with what they took last.

    Args:
        paths: where the corpora are.

    Attributes:
        taken: whether there is something yet.
        indexes: what pools look in: one for what has changed, then the corpora.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self.taken = not paths
        self.indexes: list[Corpus] = []
        self._digest = 0
        self._files: list[FollowedCorpus] = []
        self._refusal: UserError | None = None
        self._differing: Sequence[int] = ()

    def follow(self, info: CallInfo) -> int:
        """Take what the files have now, if all ranks have the same; a digest of what is taken.

        Raises:
            ValueError: nothing was taken before, and some rank's files can't be read, or are others than rank 0's; on
                every rank.
        """
        if not self.paths:
            return 0
        digests = info.gather(self._look(info.vocabulary_size))
        for _ in range(0 if self.taken else LOOKS - 1):
            if len({*digests}) > 1 and UNREADABLE not in digests:
                time.sleep(PAUSE_S)
                digests = info.gather(self._look(info.vocabulary_size))
        if len({*digests}) == 1 and UNREADABLE not in digests:
            if digests[0] != self._digest:
                self._take(info.vocabulary_size)
                self._digest, self.taken = digests[0], True
            self._differing = ()
        elif not self.taken:
            raise self._refusal or UserError(_differing(digests))
        else:
            if digests == self._differing:  # for longer than files take to change
                warnings.warn(f"{_differing(digests)}; until then corpora stay as they were", stacklevel=2)
            self._differing = digests
        return self._digest

    def _look(self, vocabulary_size: int) -> int:
        """A digest of the newest that this rank can read."""
        self._refusal = None
        try:
            if not self.taken:
                self._files = [FollowedCorpus(path, vocabulary_size) for path in self.paths]
            for file in self._files:
                file.look()
        except UserError as error:
            if not self.taken:
                self._refusal = error
                return UNREADABLE
            warnings.warn(f"{error}; until then the corpus stays as it was", stacklevel=3)
        return chain_digest(0, [file.digest for file in self._files])

    def _take(self, vocabulary_size: int) -> None:
        deltas = [file.delta for file in self._files if file.delta is not None]
        if len(deltas) > 1:
            texts = [text for delta in deltas for text in (contents_of(delta) or (UNLISTED, []))[1]]
            deltas = [new_file(vocabulary_size, texts, UNLISTED)]
        self.indexes = [*map(Corpus.of, deltas), *(Corpus.of(file.file, file.gone) for file in self._files)]


class FollowedCorpus:
    """A corpus and its delta, as they were when they could be read last.

    Args:
        path: where the corpus is.
        vocabulary_size: V of the model.

    Attributes:
        file: the corpus' array.
        delta: its delta's; None for none.
        gone: where ranges of the corpus' tokens that are gone begin and end, in turn.
        digest: stands for all three, as far as look-ups read them.

    Raises:
        ValueError: no such file, a damaged one, or one of another model.
    """

    def __init__(self, path: str, vocabulary_size: int) -> None:
        self.path = path
        self._vocabulary_size = vocabulary_size
        self._states: tuple[FileState, FileState] | None = None  # of both files, when they were looked at last
        self._file_state: FileState = None  # of what `file` was read from
        self._spans: dict[str, tuple[int, int]] | None = None  # by file, once they are needed
        self.file = np.zeros(0, np.int64)
        self.look()

    def look(self) -> None:
        """Read what has changed since.

        Raises:
            ValueError: it can't be used; said once, and all stays as it was.
        """
        path = delta_path(self.path)
        states = state_of(self.path), state_of(path)
        if states == self._states:
            return
        self._states = states
        is_new = states[0] is None or states[0] != self._file_state
        file = read_file(self.path, self._vocabulary_size) if is_new else self.file
        delta = None if states[1] is None else read_file(str(path), self._vocabulary_size)
        spans, gone = None if is_new else self._spans, list[int]()
        if delta is not None:
            try:
                listing = listing_of(delta)
                spans = spans or _spans(file)
                ranges = sorted(spans[each.path] for each in listing.files if each.path in spans)
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                remedy = "delete it, and write the corpus anew"
                raise UserError(f"{str(path)!r} or its corpus lists no files ({error}); {remedy}") from None
            if listing.base == identity_of(file):
                gone = [end for span in ranges for end in span]
            else:
                delta = None
        self.file, self._file_state, self._spans = file, states[0], spans
        self.delta, self.gone = delta, gone
        self.digest = chain_digest(0, [digest_of(file), 0 if delta is None else digest_of(delta), *gone])


def _spans(file: np.ndarray) -> dict[str, tuple[int, int]]:
    listing = listing_of(file)
    return {each.path: span for each, span in zip(listing.files, spans_of(listing), strict=True)}


def _differing(digests: Sequence[int]) -> str:
    unreadable = [str(rank) for rank, digest in enumerate(digests) if digest == UNREADABLE]
    if unreadable:
        return f"rank {', '.join(unreadable)} can't read the corpora; its own message has the reason"
    odd = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    return f"the corpora of rank {', '.join(odd)} differ from rank 0's; give every rank the same corpora"
