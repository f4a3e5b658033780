"""Keep a corpus (an index of a folder's text) up to date while files change, by a small delta file beside it.

Once the delta has grown, the corpus itself is written anew, in a thread of its own. Until then, a change takes time in
proportion to the delta, not to the corpus. `lp.draft.pool.followed_corpora` reads both files. Each of them is written
whole or not at all. If a process ends while it writes, the former file stays, and the next process finds by size and
time which of the folder's files have changed.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lp.draft.pool.corpus_file import (
    IndexedFile,
    Listing,
    contents_of,
    delta_path,
    identity_of,
    mapped,
    new_file,
    state_of,
)
from lp.draft.pool.model_ngrams import write_file
from lp.errors import UserError

from .source_files import SourceFile

if TYPE_CHECKING:
    from .watched_folder import WatchedFolder  # whose package is of an extra

WAIT_S = 0.2  # for an edit, until it is looked for whatever else there is to do
MOST_DELTA_TOKENS = 1 << 15  # and as many that are gone, from which on the corpus is written anew
AGAIN_S = 5.0  # until a delta that could not be written is tried again
REBUILD_SHARE = 0.1  # of the time goes to that, at most


class KeptCorpus:
    """Keeps the corpus of a watched folder up to date; a corpus is an index of the folder's text.

    Args:
        watched: the folder.
        tokens: returns a file's token ids; None for a file that the corpus leaves out.
        path: the corpus file, which exists.
        vocabulary_size: V, how many tokens the model knows.
    """

    def __init__(
        self,
        watched: WatchedFolder,
        tokens: Callable[[SourceFile], np.ndarray | None],
        path: Path,
        vocabulary_size: int,
    ) -> None:
        self.path = path
        self._watched = watched
        self._tokens = tokens
        self._vocabulary_size = vocabulary_size
        self._next: Future[np.ndarray] | None = None
        self._next_from_s = self._write_from_s = 0.0
        self._is_written, self._has_grown = True, False  # the delta
        self._listing: Listing | None = None
        self._texts: dict[str, tuple[IndexedFile, np.ndarray]] = {}
        self._take_base()
        self._texts, self._differing = dict(self._base), set[str]()
        known = {path: SourceFile(path, file.size, file.modified_ns) for path, (file, _) in self._base.items()}
        paths = known.keys() | watched.files.keys()
        self._update({path for path in paths if known.get(path) != watched.files.get(path)})
        if not self._is_written:
            self._write_delta()

    def keep(self) -> None:
        """Keep the corpus up to date, until Ctrl-C."""
        while True:
            self.look(WAIT_S)

    def look(self, wait_s: float = 0) -> None:
        """Look once for changed files in the folder, and write the changes to the corpus or its delta.

        Args:
            wait_s: most seconds to wait for a change.

        Raises:
            ValueError: another program has damaged the corpus, or replaced it by that of another folder or model.
        """
        if paths := self._watched.look(wait_s):
            self._update(paths)
        if self._next is not None and self._next.done():
            self._rebuilt(self._next)
        if state_of(self.path) != self._base_state:  # `lp corpus build` has written it
            self._take_base()
            self._is_written = False
        elif self._differing and not delta_path(self.path).exists():
            self._is_written = False
        now = time.monotonic()
        if not self._is_written and now >= self._write_from_s:
            self._write_delta()
        if self._has_grown and self._next is None and now >= self._next_from_s:
            self._rebuild()

    def _update(self, paths: set[str]) -> None:
        """Read these files; the delta is to be written if they have another text."""
        for path in sorted(paths):
            file, before = self._watched.files.get(path), self._texts.pop(path, None)
            tokens = None if file is None else self._tokens(file)
            if file is not None and tokens is not None:
                self._texts[path] = IndexedFile(path, file.size, file.modified_ns, len(tokens)), tokens
            self._compare(path)
            self._is_written &= before is None and tokens is None

    def _compare(self, path: str) -> None:
        """Note whether the corpus has this file as it is."""
        now, then = self._texts.get(path), self._base.get(path)
        if (now and now[0]) != (then and then[0]):
            self._differing.add(path)
        else:
            self._differing.discard(path)
            if then:
                self._texts[path] = then  # the memory of the one before is let go of

    def _take_base(self) -> None:
        """Take what the corpus has, and note which files differ from it.

        Raises:
            ValueError: it can't be read, or is of something else.
        """
        self._base_state = state_of(self.path)
        file = mapped(self.path)
        found = contents_of(file)
        if found is None:
            raise UserError(f"corpus {str(self.path)!r} is damaged: another program has written it; build it anew")
        before, (self._listing, texts) = self._listing, found
        if before and (before.folder, before.tokenizer) != (self._listing.folder, self._listing.tokenizer):
            made = f"another program has made {str(self.path)!r} of another folder, or for another model"
            raise UserError(f"{made}; give another file with -o")
        self._identity = identity_of(file)
        self._base = {each.path: (each, text) for each, text in zip(self._listing.files, texts, strict=True)}
        self._differing = set[str]()
        for path in self._base.keys() | self._texts.keys():
            self._compare(path)

    def _write_delta(self) -> None:
        """Write all that differs from the corpus."""
        assert self._listing
        path = delta_path(self.path)
        texts = [
            self._texts.get(name) or (IndexedFile(name, 0, 0, 0), np.zeros(0, np.int32)) for name in self._differing
        ]
        texts.sort(key=lambda text: text[0].path)
        listing = replace(self._listing, files=[file for file, _ in texts], base=self._identity)
        changed = sum(file.num_tokens for file, _ in texts)
        gone = sum(self._base[name][0].num_tokens for name in self._differing if name in self._base)
        # One of no tokens is none: while all files are gone, the delta says so.
        self._has_grown = changed + gone > 2 * MOST_DELTA_TOKENS and any(len(text) for _, text in self._texts.values())
        try:
            if texts:
                write_file(new_file(self._vocabulary_size, [tokens for _, tokens in texts], listing), path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:  # a full disk
            self._write_from_s = time.monotonic() + AGAIN_S
            warnings.warn(f"{str(path)!r} was not written: {error}", stacklevel=2)
            return
        self._is_written = True
        which = "1 file that has" if len(texts) == 1 else f"{len(texts):,} files that have"
        print(f"{path}: {changed:,} tokens of {which} changed" if texts else f"{path}: no longer needed", flush=True)

    def _rebuild(self) -> None:
        """Begin to sort all tokens."""
        assert self._listing
        texts = [text for _, text in sorted(self._texts.items())]
        listing = replace(self._listing, files=[file for file, _ in texts])
        sort = in_background(new_file, self._vocabulary_size, [tokens for _, tokens in texts], listing)
        self._next, self._next_began_s = sort, time.monotonic()

    def _rebuilt(self, made: Future[np.ndarray]) -> None:
        """Write the corpus whose tokens are sorted, unless another program has written it meanwhile."""
        now = time.monotonic()
        self._next, self._next_from_s = None, now + (now - self._next_began_s) * (1 / REBUILD_SHARE - 1)
        if state_of(self.path) != self._base_state:
            return
        try:
            corpus = made.result()
            write_file(corpus, self.path)
        except (OSError, ValueError, MemoryError) as error:  # the delta has what the corpus lacks
            warnings.warn(f"corpus {str(self.path)!r} was not written anew: {error}", stacklevel=2)
            return
        print(f"{self.path}: {int(corpus[2]):,} tokens of {len(self._texts):,} files", flush=True)
        self._take_base()
        self._is_written = False


def in_background(function: Callable[..., np.ndarray], *args: object) -> Future[np.ndarray]:
    """Call a function in a thread that ends with the process, and return a future of its result.

    Args:
        function: the function to call.
        args: its arguments.
    """
    made: Future[np.ndarray] = Future()

    def make() -> None:
        try:
            made.set_result(function(*args))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=make, daemon=True).start()
    return made
