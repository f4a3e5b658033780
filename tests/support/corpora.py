"""Corpora of a few texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp.draft.pool.corpus_file import IndexedFile, Listing, new_file


def corpus_of(texts: Sequence[Sequence[int]], vocabulary: int) -> np.ndarray:
    """The array of the corpus that has these texts as its files."""
    files = [IndexedFile(f"{index}.py", 10 * index, index, len(text)) for index, text in enumerate(texts)]
    return new_file(vocabulary, [np.array(text, np.int32) for text in texts], Listing("folder", 7, files))
