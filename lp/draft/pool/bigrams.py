"""Model bigrams: the best logits behind every token of the vocabulary, whatever came before it.

A pool votes with them where it has never seen the token. They depend on the model alone: `scripts/build_bigrams.py`
measures them once, and writes them beside the model. The file is memory-mapped and never written to.

V: vocabulary, K: logits of a token.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import open_memmap

from lp.compiled import compiled_array
from lp.errors import UserError
from lp.sampling.top_logits import TOKEN

FILE_NAME = "lp_bigrams.npy"  # in the folder of a model
AUTO = "auto"  # that file, where it is
OFF = "off"


class Bigrams(NamedTuple):
    """Model bigrams as compiled functions take them; K = 0: none.

    The arrays are two views of the packed logits, of which 2 * (token * K + k) + TOKEN is a token.
    """

    num_logits: int  # K
    tokens: Any  # int32
    logits: Any  # float32

    @classmethod
    def of(cls, packed_VK: np.ndarray | None) -> Bigrams:
        """Those of a file, or none."""
        packed_VK = np.zeros((0, 0), np.int64) if packed_VK is None else packed_VK
        flat = packed_VK.reshape(-1)
        return cls(packed_VK.shape[1], compiled_array(flat.view(np.int32)), compiled_array(flat.view(np.float32)))


def write_bigrams(packed_VK: np.ndarray, path: Path) -> None:
    """Write the whole file or nothing."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    data = io.BytesIO()  # numpy does not notice that a file was cut off by a disk that is full
    np.save(data, packed_VK.astype("<i8"), allow_pickle=False)
    try:
        part.write_bytes(data.getbuffer())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_bigrams(choice: str, folder: str, vocabulary_size: int) -> np.ndarray | None:
    """The model bigrams that a config asks for, int64 (V, K), memory-mapped; None for none.

    Args:
        choice: AUTO, OFF, or a path.
        folder: of the model; not of this machine where it was loaded by its name.
        vocabulary_size: V.

    Raises:
        ValueError: a path where no such file is, or a file of another model.
    """
    path = Path(folder, FILE_NAME) if choice == AUTO else Path(choice)
    if choice == OFF or (choice == AUTO and not (folder and path.is_file())):
        return None
    remedy = f"write it with scripts/build_bigrams.py, or choose pool_bigrams={OFF}"
    try:
        packed = open_memmap(path, mode="c")  # c: of a type that compiled functions take
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"pool_bigrams {str(path)!r} can't be read ({error}); {remedy}") from None
    if packed.ndim != 2 or packed.dtype != np.int64 or not packed.flags.c_contiguous or not packed.shape[1]:
        raise UserError(f"pool_bigrams {str(path)!r} holds no model bigrams; {remedy}")
    tokens = packed.view(np.int32)[:, TOKEN::2]
    if len(packed) != vocabulary_size or tokens.min(initial=0) < 0 or tokens.max(initial=0) >= vocabulary_size:
        raise UserError(
            f"pool_bigrams {str(path)!r} are of {len(packed)} tokens, and the model has {vocabulary_size}; {remedy}"
        )
    return packed
