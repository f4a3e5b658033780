"""Makes an n-gram pool for each `generate` call, and keeps what outlives a call: session tables and histories.

Tables (a pool's memory) and histories (texts that were generated earlier) are kept apart by owner, such as the user of
an API key. So one owner's texts are never used to draft for another owner. If an owner has a name, the names of the
owner's files end with it.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from lp.config import LookaheadConfig, PoolScope, corpus_name
from lp.digest import chain_digest
from lp.draft.pool.corpus import Corpus
from lp.draft.pool.followed_corpora import FollowedCorpora
from lp.draft.pool.history import MOST_TOKENS, History
from lp.draft.pool.history_file import HistoryFile
from lp.draft.pool.model_ngrams import read_file
from lp.draft.registry import Call, CallInfo, SourceFactory, register_factory
from lp.errors import UserError

if TYPE_CHECKING:  # and below where they are used: the apps' `--help` names this source, and numba takes a second
    from lp.draft.pool.ngram_pool import NGramPool
    from lp.draft.pool.tables import Tables

MAX_WEIGHT = 1e3  # of a file: it is added to others, and exponents are taken of the sum
MAX_CLOCK = 1 << 30  # steps and texts of a file
MAX_SQUARES = 50.0  # of the shipped sums of squared gradients, so that the weights still move
# A request's tables have room for the n-grams of its text and of its steps: so many bytes for a token of the text and a
# token of its steps, of which at least so many.
TOKEN_BYTES = 256
LEAST_STEP_TOKENS = 8


@register_factory("lookahead", LookaheadConfig)
class PoolFactory(SourceFactory):
    """Makes an n-gram pool, the draft source of lookahead decoding, for every `generate` call of a decoder.

    With `pool_scope="session"` a new pool continues with the tables that the same owner's earlier calls have filled.
    Otherwise it begins with empty tables.

    Args:
        config: settings of the decoder.
    """

    def __init__(self, config: LookaheadConfig) -> None:
        self.config = config
        self.tables: dict[str, Tables] = {}  # of every owner's session
        self._histories: dict[str, History] = {}  # of every owner
        self._thread = ThreadPoolExecutor(1)  # makes the indexes of histories; none is started before one is asked for
        self._model_ngrams: np.ndarray | None = None
        self._ngrams_digest: int | None = None  # once they are read
        self._corpora = FollowedCorpora(config.corpora)
        self.corpora = [corpus_name(path) for path in config.corpora]

    def new_source(self, call: Call) -> NGramPool:
        """Make the n-gram pool for one `generate` call.

        Args:
            call: facts of the call: the prompt, the owner, and the sampler's settings.

        Raises:
            ValueError: `pool_file` holds no pool of the configured size, or its folder is missing; or a history, a
                corpus or a file of model n-grams that the settings name can't be used.
        """
        from lp.draft.pool.ngram_pool import NGramPool

        self._read_ngrams(call)
        if not self._corpora.taken:
            self._corpora.follow(call)
        history, tables = self._history(call), self._session(call)
        if tables is None:
            tables = fresh_tables(self.config, call.vocabulary_size, self._needed_mib(call))
        return NGramPool(
            self.config,
            call.prompt,
            call.noise,
            tables,
            self._model_ngrams,
            call.temperature,
            [
                *map(Corpus.of, history.indexes if history else []),
                *self._corpora.indexes(call.corpora, call.vocabulary_size),
            ],
            partial(self._text_ended, call),
        )

    def digests(self, info: CallInfo) -> dict[str, int]:
        """Digests, by name, of all data that the next n-gram pool begins with, by which ranks check that they agree.

        In an owner's first call, the owner's files are opened. The digest of session tables is 0 in later calls, since
        all ranks change these tables alike.

        Args:
            info: facts of the call that is about to begin.

        Raises:
            ValueError: a file of model n-grams, a corpus, a history or a `pool_file` that the settings name can't be
                used.
        """
        digests = {"model n-grams": self._read_ngrams(info), "corpora": self._corpora.follow(info)}
        is_open = info.owner in self.tables
        history, tables = self._history(info), self._session(info)
        pool = 0 if tables is None or is_open else tables_digest(tables)
        return digests | {"history": history.digest if history else 0, "pool": pool}

    def _history(self, info: CallInfo) -> History | None:
        """The history of the owner's texts, opened at the first call; None if there is to be none."""
        if self.config.history is None or info.owner is None:
            return None
        if info.owner not in self._histories:
            path = self._file_of(self.config.history, info.owner)
            self._histories[info.owner] = opened_history(path, info, self._thread)
        return self._histories[info.owner]

    def _session(self, info: CallInfo) -> Tables | None:
        """The tables of the owner's session, opened at the first call; None if calls do not share tables."""
        if self.config.pool_scope is PoolScope.REQUEST or info.owner is None:
            return None
        if info.owner not in self.tables:
            self.tables[info.owner] = self._session_tables(info.vocabulary_size, info.owner)
        return self.tables[info.owner]

    def _text_ended(self, call: Call, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Add a finished text to the owner's history, and write the session's tables to `pool_file`, as configured."""
        if history := self._history(call):
            history.add(prompt, tokens)
        if call.owner in self.tables and self.config.pool_file is not None and call.is_main:
            file = file_of(self.config.pool_file, call.owner)
            try:
                save_tables(self.tables[call.owner], file)
            except (OSError, SafetensorError) as error:  # a full disk must not cost the text
                warnings.warn(f"pool_file {file} was not written: {error}", stacklevel=2)

    def _read_ngrams(self, info: CallInfo) -> int:
        """Read the model's n-grams at the first call; returns their digest, 0 if there are none."""
        if self._ngrams_digest is None:
            ngrams = read_file(self.config.pool_model_ngrams, info.model_folder, info.vocabulary_size)
            self._model_ngrams = ngrams
            self._ngrams_digest = 0 if ngrams is None else chain_digest(0, ngrams.ravel())
        return self._ngrams_digest

    def _needed_mib(self, call: Call) -> int:
        """Most MiB that the tables of one call need: larger ones take time to clear."""
        if call.step_tokens is None:
            return self.config.pool_mib
        needed = call.max_length * max(call.step_tokens, LEAST_STEP_TOKENS) * TOKEN_BYTES >> 20
        return min(self.config.pool_mib, 1 + needed)

    def _file_of(self, path: str, owner: str) -> str:
        """Path of an owner's file.

        Raises:
            ValueError: the owner's name makes it the path of another file that the config names.
        """
        file = file_of(path, owner)
        for name in ("history", "pool_file"):
            other = getattr(self.config, name)
            if owner and other is not None and os.path.realpath(other) == os.path.realpath(file):
                raise UserError(
                    f"{file!r} is {name} and the file of the owner {owner!r}, too; give {name} another file"
                )
        return file

    def _session_tables(self, vocabulary_size: int, owner: str) -> Tables:
        """The tables that a session begins with: read from `pool_file` if it exists, else empty.

        Raises:
            ValueError: the file can't be used, or its folder is missing.
        """
        file = self.config.pool_file and self._file_of(self.config.pool_file, owner)
        tables = fresh_tables(self.config, vocabulary_size)
        if file and Path(file).exists():
            load_tables(tables, file, vocabulary_size)
        elif file and not Path(file).parent.is_dir():
            raise UserError(f"pool_file is {file!r}, but there is no folder {str(Path(file).parent)!r}; make it first")
        return tables


def file_of(path: str | os.PathLike[str], owner: str) -> str:
    """Path of one owner's file: the configured path, with ".OWNER" appended if the owner has a name.

    Args:
        path: the configured path.
        owner: name of the owner, such as the user of an API key; may be empty.
    """
    return f"{os.fspath(path)}.{owner}" if owner else os.fspath(path)


def opened_history(path: str, info: CallInfo, thread: ThreadPoolExecutor) -> History:
    """Open a history (texts that were generated earlier) on rank 0, and send its texts to all ranks.

    All ranks must call this together.

    Args:
        path: path of the history's file, which rank 0 makes if it is missing.
        info: facts of the call: tells which rank this is, and sends numbers from rank 0 to all ranks.
        thread: executor in which the history makes its indexes in the background.

    Raises:
        ValueError: rank 0 can't use the file; raised on every rank.
    """
    file, refusal = None, None
    if info.is_main:
        try:
            file = HistoryFile(path, info.vocabulary_size, MOST_TOKENS)
        except UserError as error:
            refusal = error
    own = file.texts() if file else []
    lengths = info.share(None if refusal else [len(text) for text in own])
    if lengths is None:
        raise refusal or UserError(f"rank 0 can't open history {path!r}; its message has the reason")
    tokens = info.share(np.concatenate([np.zeros(0, np.int32), *own]).tolist())
    texts = np.split(np.array(tokens, np.int32), np.cumsum(lengths)[:-1]) if lengths else []
    return History(info.vocabulary_size, texts, file, thread)


def fresh_tables(config: LookaheadConfig, vocabulary_size: int, mebibytes: int | None = None) -> Tables:
    """Make empty tables, the memory of an n-gram pool, with trained weights for the mixture that predicts tokens.

    The script scripts/train_pool_weights.py trained these weights.

    Args:
        config: settings with the memory limit `pool_mib`, and with the number of top-k logits to store for a context.
        vocabulary_size: V, number of tokens in the model's vocabulary; no more logits than this are stored.
        mebibytes: memory limit of the tables, in MiB; None: `config.pool_mib`.
    """
    shipped = _shipped_weights()
    squares = 1 + np.minimum(shipped["squares"], MAX_SQUARES)
    num_logits = min(config.ablation.num_logits, vocabulary_size)
    from lp.draft.pool.tables import new_tables

    return new_tables(num_logits, mebibytes or config.pool_mib, shipped["weights"], squares)


@lru_cache(maxsize=1)
def _shipped_weights() -> dict[str, np.ndarray]:
    return load_file(Path(__file__).with_name("weights.safetensors"))


def save_tables(tables: Tables, path: str) -> None:
    """Write a session's tables (an n-gram pool's memory) to a safetensors file, completely or not at all.

    The file is not locked. If several decoders write it, the tables that were written last stay. (The file of a history
    is locked, since texts are appended to it.)

    Args:
        tables: the tables to write.
        path: path of the file, which is replaced.
    """
    arrays = {name: np.asarray(values) for name, values in tables._asdict().items()}
    part = Path(f"{path}.{threading.get_native_id()}.part")  # which no other thread of the machine has
    try:
        save_file(arrays, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_tables(tables: Tables, path: str, vocabulary_size: int) -> None:
    """Fill new tables (an n-gram pool's memory) with the contents of a file that `save_tables` wrote.

    Args:
        tables: tables to overwrite; the arrays in the file must have the same shapes.
        path: path of the file.
        vocabulary_size: V, number of tokens in the model's vocabulary; all token ids must be below it.

    Raises:
        ValueError: the file can't be read, has other shapes, or holds values that no pool of this model can have.
    """
    try:
        arrays = load_file(path)
    except Exception as error:
        raise UserError(f"pool_file {path} can't be read as safetensors ({error}); delete it to begin anew") from None
    for name, values in tables._asdict().items():
        array, loaded = np.asarray(values), arrays.get(name)
        if loaded is None or loaded.shape != array.shape or loaded.dtype != array.dtype:
            raise UserError(f"pool_file {path} is of another pool_mib, num_logits or version; delete it to begin anew")
        array[:] = loaded
    followers = (np.asarray(tables.followers) >> 32) - 1  # -1 is empty
    logits_tokens = np.asarray(tables.logits_tokens)
    least = min(int(followers.min()) + 1, int(logits_tokens.min(initial=0)))
    largest = max(int(followers.max()), int(logits_tokens.max(initial=0)))
    if least < 0:
        raise UserError(f"pool_file {path} has tokens below 0, which no pool has; delete it to begin anew")
    if largest >= vocabulary_size:
        raise UserError(f"pool_file {path} has token {largest}, the model {vocabulary_size}; it is another model's")
    weights, squares = np.asarray(tables.weights), np.asarray(tables.squares)
    if not (np.abs(weights) <= MAX_WEIGHT).all() or not ((squares > 0) & np.isfinite(squares)).all():
        raise UserError(f"pool_file {path} has weights that no pool learns; delete it to begin anew")
    if not all(0 <= count < MAX_CLOCK for count in np.asarray(tables.clock).tolist()):
        raise UserError(f"pool_file {path} has counted steps or texts that no pool has seen; delete it to begin anew")


def tables_digest(tables: Tables) -> int:
    """Digest of all contents of a pool's tables, by which ranks check that they agree.

    Equal tables have equal digests on every machine.

    Args:
        tables: the tables, which are the memory of an n-gram pool.
    """
    return chain_digest(0, *(np.asarray(values).view(np.int32) for values in tables))
