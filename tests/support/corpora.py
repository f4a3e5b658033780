"""Corpora of a few texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lp.draft.pool.corpus_file import IndexedFile, Listing, identity_of, listing_of, new_file


def corpus_of(texts: Sequence[Sequence[int]], vocabulary: int) -> np.ndarray:
    """The array of the corpus that has these texts as its files."""
    files = [IndexedFile(f"{index}.py", 10 * index, index, len(text)) for index, text in enumerate(texts)]
    return new_file(vocabulary, [np.array(text, np.int32) for text in texts], Listing("folder", 7, files))


def delta_of(base: np.ndarray, texts: Mapping[str, Sequence[int]], vocabulary: int) -> np.ndarray:
    """The array of the delta in which these texts stand for the base's files of their names."""
    files = [IndexedFile(name, 1, 1, len(text)) for name, text in texts.items()]
    listing = replace(listing_of(base), files=files, base=identity_of(base))
    return new_file(vocabulary, [np.array(text, np.int32) for text in texts.values()], listing)
