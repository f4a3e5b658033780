"""Model n-grams: the largest logits after frequent contexts of 1 to 3 tokens, measured once for each model.

The logits are averages over texts that the model itself generated. An n-gram pool uses them for contexts after which it
has not seen logits in the present text. `lp ngrams` measures them, and every process maps their file into memory.

The file is one int64 array: HEADER numbers, then the keys of R rows, then the packed logits of each row. A row belongs
to one context. It lies in the bucket of WAYS rows that the context's hash selects, as in `lp.draft.pool.tables`.

V: size of the vocabulary; K: number of logits for a context; R: number of rows, a power of two.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import open_memmap

from lp.commands import app_command
from lp.compiled import compiled_array, compiled_ints, jit
from lp.draft.pool.tables import (
    MODEL,
    WAYS,
    Context,
    bucket,
    context_key,
    fill_context,
    hash_context,
    new_context,
)
from lp.errors import UserError
from lp.sampling.top_logits import TOKEN

FILE_NAME = "lp_model_ngrams.npy"  # in the folder of a model
AUTO = "auto"  # setting: use that file if it exists
OFF = "off"  # setting: no model n-grams
MARK = 0x6E6772616D31  # first number of such a file; another layout or hash gets another mark
HEADER = 4  # numbers: MARK, V, R, K
FULL = 0.6  # most rows of a new file that are filled, as a share: contexts whose bucket is full are left out


class ModelNgrams(NamedTuple):
    """A look-up table of model n-grams (logits measured once for a model), in the form that compiled functions search.

    In an empty table the number of logits for a context is 0.
    """

    num_logits: int  # K
    keys: Any  # uint64 (R,): hash of each row's context; 0 is empty
    tokens: Any  # int32 (2 * R * K,): the k-th token of a row is at 2 * (row * K + k) + TOKEN
    logits: Any  # float32 (2 * R * K,): the same memory; its logit is at 2 * (row * K + k) + LOGIT

    @classmethod
    def of(cls, file: np.ndarray | None) -> ModelNgrams:
        """Build a look-up table of model n-grams (logits measured once for a model), for functions compiled by numba.

        Args:
            file: int64 array of a file of model n-grams, as `read_file` returns it; None gives an empty table.
        """
        if file is None:
            file = np.array([MARK, 0, WAYS, 0] + [0] * WAYS, np.int64)
        _, _, rows, num_logits = file[:HEADER].tolist()
        keys, packed = file[HEADER : HEADER + rows], file[HEADER + rows :]
        tokens, logits = (compiled_array(packed.view(dtype)) for dtype in (np.int32, np.float32))
        return cls(num_logits, compiled_array(keys.view(np.uint64)), tokens, logits)


class Contexts(NamedTuple):
    """Contexts (runs of tokens) of one length, the most frequent first, with the top-k logits measured after each."""

    tokens: np.ndarray  # int64 (n, length), the newest last
    packed: np.ndarray  # int64 (n, K), as `pack_top_logits` packs them


def rows_of(mebibytes: float, num_logits: int) -> int:
    """Number of rows in the largest file of model n-grams that fits a size limit; a power of two, and at least 4.

    A row holds the logits after one context.

    Args:
        mebibytes: most size of the file, in MiB.
        num_logits: K, number of logits in a row.
    """
    rows = int(mebibytes * 2**20) // (8 * (1 + num_logits))
    return 1 << max(rows.bit_length() - 1, 2)


def new_file(vocabulary_size: int, rows: int, contexts: Sequence[Contexts]) -> tuple[np.ndarray, int]:
    """Make the array of a file of model n-grams from measured contexts; contexts that find no room are left out.

    Args:
        vocabulary_size: V, number of tokens in the model's vocabulary.
        rows: R, number of rows in the file, a power of two.
        contexts: contexts and their logits, one entry for each context length, all with the same K; the first ones are
            stored first.

    Returns:
        The array, int64 (4 + R + R * K,), and the number of contexts stored in it.
    """
    num_logits = contexts[0].packed.shape[1]
    keys = np.zeros(rows, np.int64)
    packed = np.zeros((rows, num_logits), np.int64)
    placed, room = 0, int(rows * FULL)
    for each in contexts:
        tokens = np.ascontiguousarray(each.tokens[: room - placed])
        found = np.zeros(len(tokens), np.int64)
        compiled_keys = compiled_array(keys.view(np.uint64))
        _place(compiled_keys, new_context(), compiled_ints(tokens.reshape(-1)), compiled_array(found))
        has_row = found >= 0
        packed[found[has_row]] = each.packed[: len(tokens)][has_row]
        placed += int(has_row.sum())
    return np.concatenate([np.array([MARK, vocabulary_size, rows, num_logits]), keys, packed.reshape(-1)]), placed


@jit
def _place(keys: Any, context: Context, tokens: Any, found: Any) -> None:
    """Give every context a row of its bucket: fills `keys`, and `found` with its row, -1 if the bucket is full."""
    length = len(tokens) // max(len(found), 1)
    for index in range(len(found)):
        known = fill_context(context, tokens, index * length, (index + 1) * length)
        hash_context(context, known)
        key = context_key(context.hashes[known], MODEL, 0)
        first = bucket(keys, key)
        row = -1
        for way in range(WAYS):
            if row < 0 and (keys[first + way] == 0 or keys[first + way] == key):
                row = first + way
        if row >= 0:
            keys[row] = key
        found[index] = row


def write_file(array: np.ndarray, path: Path) -> None:
    """Write an array of model n-grams to a file, which is replaced completely or not at all.

    Args:
        array: int64 array, as `new_file` returns it.
        path: path of the file.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    data = io.BytesIO()  # numpy does not notice that a file was cut off by a disk that is full
    np.save(data, array.astype("<i8"), allow_pickle=False)
    try:
        part.write_bytes(data.getbuffer())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_file(choice: str, folder: str, vocabulary_size: int) -> np.ndarray | None:
    """Memory-map the file of model n-grams (logits measured once for a model) that the settings ask for.

    With AUTO, a file that does not fit the model's vocabulary is ignored with a warning, since nobody asked for this
    file.

    Args:
        choice: AUTO for the file in the model's folder, if there is one; OFF for none; or the path of a file.
        folder: the model's folder, searched for AUTO; it need not exist, for example if a model was loaded by its name.
        vocabulary_size: V, number of tokens in the model's vocabulary.

    Returns:
        The file's array, int64; None if no model n-grams are to be used.

    Raises:
        ValueError: the file can't be read, holds no model n-grams, or does not fit the model's vocabulary.
    """
    path = Path(folder, FILE_NAME) if choice == AUTO else Path(choice)
    if choice == OFF or (choice == AUTO and not (folder and path.is_file())):
        return None
    remedy = f"write it with {app_command('ngrams')} MODEL, or choose pool_model_ngrams={OFF}"
    try:
        file = open_memmap(path, mode="c")  # c: of a type that compiled functions take
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"pool_model_ngrams {str(path)!r} can't be read ({error}); {remedy}") from None
    if not _is_whole(file):
        raise UserError(f"pool_model_ngrams {str(path)!r} holds no model n-grams; {remedy}")
    _, vocabulary, rows, _ = file[:HEADER].tolist()
    tokens = file[HEADER + rows :].view(np.int32)[TOKEN::2]
    differing = f"{str(path)!r} are of {vocabulary} tokens, and the model has {vocabulary_size}; {remedy}"
    if vocabulary != vocabulary_size and choice == AUTO:
        warnings.warn(f"model n-grams are left out: {differing}", stacklevel=2)
        return None
    if vocabulary != vocabulary_size or tokens.min(initial=0) < 0 or tokens.max(initial=0) >= vocabulary_size:
        raise UserError(f"pool_model_ngrams {differing}")
    return file


def _is_whole(file: np.ndarray) -> bool:
    """Whether an array begins with a valid header and has the length that it states."""
    if file.ndim != 1 or file.dtype != np.int64 or len(file) < HEADER:
        return False
    mark, _, rows, num_logits = file[:HEADER].tolist()
    whole = rows >= WAYS and rows & (rows - 1) == 0 and num_logits > 0 and len(file) == HEADER + rows * (1 + num_logits)
    return bool(mark == MARK and whole)
