"""Digests of lists of integers and of texts, equal on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def chain_digest(previous: int, *parts: Sequence[int] | np.ndarray) -> int:
    """A 63-bit digest of the previous one and these lists of ints, equal on every machine."""
    hasher = hashlib.blake2b(previous.to_bytes(8, "little"), digest_size=8)
    for part in parts:
        hasher.update(len(part).to_bytes(4, "little"))
        hasher.update(np.ascontiguousarray(part, dtype="<i8").data)
    return int.from_bytes(hasher.digest(), "little") >> 1


def text_digest(text: str) -> int:
    """A 63-bit digest of a text."""
    return chain_digest(0, list(text.encode()))
