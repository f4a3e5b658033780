"""Follows the files of corpora, which may change while a decoder runs; each text uses the contents at its beginning.

A corpus is an index of tokenized files. A delta may lie beside it, FILE.delta, which `lp corpus watch` writes: a small
corpus of the files that have changed since. Files in the delta replace files with the same paths in the corpus, so the
tokens of the replaced files count as gone. A deleted file is listed in the delta without tokens. A delta belongs to one
corpus, and is ignored beside another one.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lp.config import corpus_name
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
AGAIN_S = 1.0  # until a file that could not be read is tried again


class FollowedCorpora:
    """Corpora (indexes of tokenized files) that are read again when their files have changed, alike on all ranks.

    Files are checked at the beginning of each text. If ranks have read different contents, because files changed in
    between, or if a rank can't read its files, all ranks keep the contents that they used before.

    Args:
        paths: paths of the corpora; may be empty.

    Attributes:
        taken: whether all ranks have already agreed on contents, which can be kept if new ones can't be used; True if
            `paths` is empty.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self.taken = not paths
        self._digest = 0
        self._parts: list[Parts] = []  # of what is taken
        self._deltas: Deltas = {}
        self._found: tuple[list[Parts], Deltas] = [], {}  # both, if ranks agree
        self._files: list[FollowedCorpus] = []
        self._refusal: UserError | None = None
        self._differing: Sequence[int] = ()

    def follow(self, info: CallInfo) -> int:
        """Switch to the present contents of the corpora's files, if all ranks have read equal contents.

        All ranks must call this together.

        Args:
            info: facts of the call that is about to begin; its function `gather` lets ranks compare what they have
                read.

        Returns:
            Digest of the corpora that are used from now on; 0 if there are no corpora.

        Raises:
            ValueError: some rank can't read its files or has other contents than rank 0, and there are no earlier
                contents to keep; raised on every rank.
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
                (self._parts, self._deltas), self._digest, self.taken = self._found, digests[0], True
            self._differing = ()
        elif not self.taken:
            raise self._refusal or UserError(_differing(digests))
        else:
            if digests == self._differing:  # for longer than files take to change
                warnings.warn(f"{_differing(digests)}; until then corpora stay as they were", stacklevel=2)
            self._differing = digests
        return self._digest

    def indexes(self, names: Sequence[str] | None, vocabulary_size: int) -> list[Corpus]:
        """List the indexes to search for one text: an index of all changed files (if any), then each corpus.

        Args:
            names: names of the corpora that the text may be drafted from; None: all corpora.
            vocabulary_size: V, number of tokens in the model's vocabulary.
        """
        parts = [part for part in self._parts if names is None or part.name in names]
        delta = delta_of(parts, self._deltas, vocabulary_size)
        return [*map(Corpus.of, delta), *(Corpus.of(part.file, part.gone) for part in parts)]

    def _look(self, vocabulary_size: int) -> int:
        """Read what has changed; returns a digest of what this rank would use, UNREADABLE if it has nothing to use."""
        self._refusal = None
        try:
            if not self.taken:
                self._files = [FollowedCorpus(path, vocabulary_size) for path in self.paths]
            for file in self._files:
                file.look()
            digest = chain_digest(0, [file.digest for file in self._files])
            if digest != self._digest:
                parts, deltas = self._read_parts(), Deltas()
                delta_of(parts, deltas, vocabulary_size)  # here, where memory may be short: most texts look in all
                self._found = parts, deltas
            return digest
        except (UserError, MemoryError) as error:
            if not self.taken:
                more = UserError(f"{self.paths} need more memory than there is; name fewer corpora")
                self._refusal = error if isinstance(error, UserError) else more
                return UNREADABLE
            warnings.warn(f"{error}; until then the corpus stays as it was", stacklevel=3)
            return self._digest

    def _read_parts(self) -> list[Parts]:
        """The corpora with their deltas, as the files were when last looked at.

        Raises:
            ValueError: a delta was damaged since it was read.
        """
        several = sum(file.delta is not None for file in self._files) > 1
        parts = []
        for file in self._files:
            changed: list[np.ndarray] = []
            if several and file.delta is not None:
                found = contents_of(file.delta)
                if found is None:
                    raise UserError("a delta was damaged since it was read; delete it, and write its corpus anew")
                changed = found[1]
            parts.append(Parts(corpus_name(file.path), file.file, file.delta, file.gone, changed))
        return parts


class Parts(NamedTuple):
    """The contents of one corpus that texts use now; newer contents may already be read from its files.

    Attributes:
        name: name by which requests choose the corpus.
        file: the corpus' array, int64.
        delta: array of the corpus' delta, an index of changed files; None if it has no delta.
        gone: ranges of the corpus' tokens that the delta replaces: begin and end (exclusive) of each range in turn,
            ascending.
        changed: token ids of each changed file, int32, if several corpora have deltas, because these are merged into
            one index; else empty.
    """

    name: str
    file: np.ndarray
    delta: np.ndarray | None
    gone: list[int]
    changed: list[np.ndarray]


Deltas = dict[tuple[str, ...], np.ndarray]  # of several corpora, by the names of those that have one


def delta_of(parts: Sequence[Parts], known: Deltas, vocabulary_size: int) -> list[np.ndarray]:
    """Merge the deltas (indexes of changed files) of several corpora, so that only one index has to be searched.

    Args:
        parts: contents of the corpora.
        known: deltas that were merged earlier, by the names of their corpora; a newly merged one is added.
        vocabulary_size: V, number of tokens in the model's vocabulary.

    Returns:
        A list with the array of the index; an empty list if no corpus has a delta.
    """
    having = [part for part in parts if part.delta is not None]
    if len(having) < 2:
        return [part.delta for part in having if part.delta is not None]
    names = tuple(part.name for part in having)
    if names not in known:
        known[names] = new_file(vocabulary_size, [text for part in having for text in part.changed], UNLISTED)
    return [known[names]]


class FollowedCorpus:
    """The newest contents of one corpus, and of its delta (an index of changed files), that this rank could read.

    The method `look` updates the attributes.

    Args:
        path: path of the corpus.
        vocabulary_size: V, number of tokens in the model's vocabulary.

    Attributes:
        file: the corpus' array, int64.
        delta: array of the corpus' delta; None if it has no delta.
        gone: ranges of the corpus' tokens that the delta replaces: begin and end (exclusive) of each range in turn,
            ascending.
        digest: digest of `file`, `delta` and `gone`, by which ranks check that they agree.

    Raises:
        ValueError: the file is missing, damaged, or was made for a model with another vocabulary.
    """

    def __init__(self, path: str, vocabulary_size: int) -> None:
        self.path = path
        self._vocabulary_size = vocabulary_size
        self._states: tuple[FileState, FileState] | None = None  # of both files, when they were looked at last
        self._again_s = math.inf  # when what could not be read is tried again
        self._file_state: FileState = None  # of what `file` was read from
        self._spans: dict[str, tuple[int, int]] | None = None  # by file, once they are needed
        self.file = np.zeros(0, np.int64)
        self.look()

    def look(self) -> None:
        """Read the corpus and its delta (an index of changed files) again if their files have changed meanwhile.

        Raises:
            ValueError: a changed file can't be used. The attributes keep their values. Later calls try again every
                AGAIN_S seconds, and raise the error until the file can be used.
        """
        path = delta_path(self.path)
        states = state_of(self.path), state_of(path)
        if states == self._states and time.monotonic() < self._again_s:
            return
        self._states, self._again_s = states, time.monotonic() + AGAIN_S
        is_new = states[0] is None or states[0] != self._file_state
        file = read_file(self.path, self._vocabulary_size) if is_new else self.file
        delta = None if states[1] is None else self._read_delta(path)
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
        self._again_s = math.inf

    def _read_delta(self, path: Path) -> np.ndarray:
        try:
            return read_file(str(path), self._vocabulary_size)
        except UserError as error:
            cause = str(error).partition(";")[0]
            raise UserError(f"{cause}; delete it, and write its corpus {self.path!r} anew") from None


def _spans(file: np.ndarray) -> dict[str, tuple[int, int]]:
    listing = listing_of(file)
    return {each.path: span for each, span in zip(listing.files, spans_of(listing), strict=True)}


def _differing(digests: Sequence[int]) -> str:
    unreadable = [str(rank) for rank, digest in enumerate(digests) if digest == UNREADABLE]
    if unreadable:
        return f"rank {', '.join(unreadable)} can't read the corpora; its own message has the reason"
    odd = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    return f"the corpora of rank {', '.join(odd)} differ from rank 0's; give every rank the same corpora"
