"""Model bigrams: the best logits behind every token of the vocabulary, whatever came before it.

A pool votes with them where it has never seen the token. They depend on the model alone: `scripts/build_bigrams.py`
measures them once, and writes them beside the model. The file is memory-mapped and never written to.

V: vocabulary, K: logits of a token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lp.compiled import compiled_array
from lp.errors import UserError
from lp.sampling.top_logits import TOKEN, pack_top_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE_NAME = "lp_bigrams.npy"  # in the folder of a model
AUTO = "auto"  # that file, where it is
OFF = "off"
NUM_LOGITS = 16  # K
BATCH = 64  # texts of a pass


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


def measure_bigrams(
    model: PreTrainedModel, contexts: Sequence[Sequence[int]], num_logits: int = NUM_LOGITS, batch: int = BATCH
) -> np.ndarray:
    """The best logits behind every token, of its probabilities' mean over these contexts.

    Args:
        model: on its device.
        contexts: tokens to come before it, alike in nothing but that they may come before anything.
        num_logits: K.
        batch: texts of a pass.

    Returns:
        int64 (V, K), as `pack_top_logits` packs them.
    """
    import torch

    from lp.models.loader import vocabulary_size
    from lp.models.vocabulary import embedded_tokens

    device = model.get_input_embeddings().weight.device
    packed = []
    with torch.inference_mode():
        for tokens in torch.arange(vocabulary_size(model), device=device).split(batch):
            probabilities = torch.zeros((), device=device)
            for context in contexts:
                before = torch.tensor(list(context), dtype=torch.int64, device=device).expand(len(tokens), -1)
                ids = torch.cat([before, tokens[:, None].clamp(max=embedded_tokens(model) - 1)], 1)
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
                probabilities = probabilities + logits.float().softmax(-1)
            packed.append(pack_top_logits((probabilities / len(contexts)).log(), num_logits).cpu().numpy())
    return np.concatenate(packed)


def write_bigrams(packed_VK: np.ndarray, path: Path) -> None:
    """Write the whole file or nothing."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.save(file, packed_VK.astype("<i8"), allow_pickle=False)
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
        packed = np.load(path, mmap_mode="c", allow_pickle=False)  # c: of a type that compiled functions take
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
