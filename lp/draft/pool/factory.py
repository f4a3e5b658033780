"""Pools for a decoder's calls, and what outlives a call: a session's tables and their file."""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from lp.config import LookaheadConfig, PoolScope
from lp.digest import chain_digest
from lp.draft.pool import corpus_file
from lp.draft.pool.model_ngrams import read_file
from lp.draft.registry import Call, SourceFactory, register_factory
from lp.errors import UserError

if TYPE_CHECKING:  # and below where they are used: the apps' `--help` names this source, and numba takes a second
    from lp.draft.pool.ngram_pool import NGramPool
    from lp.draft.pool.tables import Tables

MAX_SQUARES = 50.0  # of the shipped sums of squared gradients, so that the weights still move
# A request's tables have room for the n-grams of its text and of its steps: so many bytes for a token of the text and a
# token of its steps, of which at least so many.
TOKEN_BYTES = 256
LEAST_STEP_TOKENS = 8


@register_factory("lookahead", LookaheadConfig)
class PoolFactory(SourceFactory):
    """Makes a pool for every call: with new tables, or for scope "session" with those of the decoder's last call.

    Args:
        config: the pools' config.
    """

    def __init__(self, config: LookaheadConfig) -> None:
        self.config = config
        self.tables: Tables | None = None  # of a session
        self._model_ngrams: np.ndarray | None = None
        self._corpora: list[np.ndarray] = []
        self._digests: dict[str, int] | None = None  # of both, once they are read

    def new_source(self, call: Call) -> NGramPool:
        """The pool of one call.

        Raises:
            ValueError: the session's file is no such pool, or its folder is missing; no file of model n-grams, or no
                corpus, where one is asked for.
        """
        from lp.draft.pool.ngram_pool import NGramPool

        self._read(call.model_folder, call.vocabulary_size)
        beside = (self._model_ngrams, call.temperature, self._corpora)
        if self.config.pool_scope is PoolScope.REQUEST:
            tables = fresh_tables(self.config, call.vocabulary_size, self._needed_mib(call))
            return NGramPool(self.config, call.prompt, call.noise, tables, *beside)
        if self.tables is None:
            tables = self._session_tables(call.vocabulary_size)
            call.check_same({"pool": tables_digest(tables)})
            self.tables = tables
        return NGramPool(self.config, call.prompt, call.noise, self.tables, *beside)

    def digests(self, model_folder: str, vocabulary_size: int) -> dict[str, int]:
        """Digests, by name, of what the pools of all ranks begin with alike.

        Raises:
            ValueError: no file of model n-grams, or no corpus, where one is asked for.
        """
        return self._read(model_folder, vocabulary_size)

    def _read(self, model_folder: str, vocabulary_size: int) -> dict[str, int]:
        """Read the model's n-grams and the corpora, once; returns their digests, 0 for none."""
        if self._digests is None:
            ngrams = self._model_ngrams = read_file(self.config.pool_model_ngrams, model_folder, vocabulary_size)
            self._corpora = [corpus_file.read_file(path, vocabulary_size) for path in self.config.corpora]
            self._digests = {
                "model n-grams": 0 if ngrams is None else chain_digest(0, ngrams.ravel()),
                "corpora": chain_digest(0, [corpus_file.digest_of(file) for file in self._corpora]),
            }
        return self._digests

    def call_ended(self, is_main: bool) -> None:
        """Write the session's tables to its file, on rank 0, so that the next process has them."""
        if self.tables is None or self.config.pool_file is None or not is_main:
            return
        try:
            save_tables(self.tables, self.config.pool_file)
        except (OSError, SafetensorError) as error:  # a full disk must not cost the text
            warnings.warn(f"pool_file {self.config.pool_file} was not written: {error}", stacklevel=4)

    def _needed_mib(self, call: Call) -> int:
        """Clearing more than a text can fill takes time."""
        if call.step_tokens is None:
            return self.config.pool_mib
        needed = call.max_length * max(call.step_tokens, LEAST_STEP_TOKENS) * TOKEN_BYTES >> 20
        return min(self.config.pool_mib, 1 + needed)

    def _session_tables(self, vocabulary_size: int) -> Tables:
        """The tables that a session begins with, read from its file if there is one; a missing folder is refused."""
        file = self.config.pool_file
        tables = fresh_tables(self.config, vocabulary_size)
        if file and Path(file).exists():
            load_tables(tables, file, vocabulary_size)
        elif file and not Path(file).parent.is_dir():
            raise UserError(f"pool_file is {file!r}, but there is no folder {str(Path(file).parent)!r}; make it first")
        return tables


def fresh_tables(config: LookaheadConfig, vocabulary_size: int, mebibytes: int | None = None) -> Tables:
    """Empty tables, with the weights that scripts/train_pool_weights.py learned.

    Args:
        mebibytes: most memory that they may take, MiB; None: the config's.
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
    """Write them to one safetensors file, whole or not at all."""
    arrays = {name: np.asarray(values) for name, values in tables._asdict().items()}
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        save_file(arrays, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_tables(tables: Tables, path: str, vocabulary_size: int) -> None:
    """Replace what fresh tables remember by what a file does.

    Raises:
        ValueError: it is no pool, or one of another size.
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


def tables_digest(tables: Tables) -> int:
    """A digest of everything remembered, equal on every machine."""
    return chain_digest(0, *(np.asarray(values).view(np.int32) for values in tables))
