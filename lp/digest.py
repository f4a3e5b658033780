"""Digests (hashes) of strings and of lists of integers, equal on every machine: ranks and files compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def chain_digest(previous: int, *parts: Sequence[int] | np.ndarray) -> int:
    """Extend a digest (hash) by lists of integers, and return the new digest.

    Args:
        previous: the digest so far; 0 to begin with.
        parts: lists or arrays of integers that fit into 64 bits.

    Returns:
        A digest of 63 bits: a BLAKE2b hash, equal on every machine.
    """
    hasher = hashlib.blake2b(previous.to_bytes(8, "little"), digest_size=8)
    for part in parts:
        hasher.update(len(part).to_bytes(4, "little"))
        hasher.update(np.ascontiguousarray(part, dtype="<i8").data)
    return int.from_bytes(hasher.digest(), "little") >> 1


def text_digest(text: str) -> int:
    """Digest (hash) of a string, 63 bits, equal on every machine."""
    return chain_digest(0, list(text.encode()))
