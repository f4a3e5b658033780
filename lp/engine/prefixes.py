"""Prefix reuse: the KV caches of sequences that have ended, kept until other sequences need the cache slots.

A sequence is a prompt and the tokens that were generated after it; the code calls it a text. An editor sends the same
file after every keystroke, and a chat its whole past with every message. The prefix that such a prompt shares with an
earlier sequence is copied from that sequence's cache instead of being computed. This is exact, since the KV of a token
depends only on the tokens before it. A copy reads as much memory as one plain step, and leaves the earlier sequence as
it was, for the next prompt.

Sequences are kept in a sorted list, where the sequence that shares most with a prompt is next to the prompt's own
place. A prompt reuses only sequences of its own owner: otherwise the time to its first token would tell what others
have asked.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lp.models.kv_cache import StaticKVCache


@dataclass(frozen=True, eq=False)
class CachedText:
    """A sequence (prompt and generated tokens) whose KV is cached, so that a later prompt may reuse a prefix of it.

    Attributes:
        tokens: int64 (tokens,), ids of the sequence's first tokens, as many as have cached KV.
        cache: the KV cache, which has these tokens in its first slots.
        owner: name of the sequence's owner, whose prompts may reuse it.
    """

    tokens: np.ndarray
    cache: StaticKVCache
    owner: str = ""


class Prefixes:
    """The sequences that are kept for prefix reuse, with their KV caches.

    Each sequence belongs to an owner, such as a client with a key of its own, whose requests alone may reuse it. If one
    of an owner's sequences is a prefix of another, only the longer one is kept.

    Args:
        give_back: function that frees the slots of a cache.
    """

    def __init__(self, give_back: Callable[[StaticKVCache], None]) -> None:
        self._give_back = give_back
        self._sorted: list[bytes] = []
        self._texts: dict[bytes, CachedText] = {}  # the one not used for longest first
        self.slots = 0  # cache slots of all kept texts together

    def __len__(self) -> int:
        return len(self._texts)

    def keep(self, tokens: Sequence[int], cache: StaticKVCache, owner: str = "") -> None:
        """Keep an ended sequence's cache for reuse; free it if a kept one of the same owner begins with its tokens.

        Args:
            tokens: ids of the sequence's tokens whose KV is cached.
            cache: the sequence's cache, with as many slots as tokens.
            owner: name of the sequence's owner.
        """
        text = CachedText(np.array(tokens, np.int64), cache, owner)
        key = _sort_key(text.tokens, owner)
        at = bisect(self._sorted, key)
        before, behind = self._sorted[max(at - 1, 0) : at], self._sorted[at : at + 1]
        for other in before:
            if key.startswith(other):  # of no more use
                self._drop(other)
        for other in behind:
            if other.startswith(key):
                self._note_use(other)
                self._give_back(cache)
                return
        insort(self._sorted, key)
        self._texts[key] = text
        self.slots += len(tokens)

    def longest(
        self, prompt: Sequence[int], running: Iterable[CachedText] = (), owner: str = ""
    ) -> tuple[CachedText | None, int]:
        """Find the cached sequence that shares the longest prefix with a prompt.

        Args:
            prompt: ids of the prompt's tokens.
            running: sequences that still run, to search as well.
            owner: name of the prompt's owner; sequences of other owners are passed over.

        Returns:
            The sequence, and the number of tokens that it shares; None and 0 if no sequence begins like the prompt.
        """
        tokens = np.array(prompt, np.int64)
        at = bisect(self._sorted, _sort_key(tokens, owner))
        beside = {key: self._texts[key] for key in self._sorted[max(at - 1, 0) : at + 1]}
        found, most = None, 0
        for text in [*beside.values(), *running]:
            if text.owner == owner and (count := common(text.tokens, tokens)) > most:
                found, most = text, count
        for key, text in beside.items():
            if text is found:
                self._note_use(key)
        return found, most

    def drop_oldest(self, but: CachedText | None = None) -> bool:
        """Free the cache of the kept sequence that was least recently used.

        Args:
            but: a sequence that must not be freed; None: any may be freed.

        Returns:
            Whether there was a sequence to free.
        """
        for key, text in self._texts.items():
            if text is not but:
                self._drop(key)
                return True
        return False

    def clear(self) -> None:
        """Free the caches of all kept sequences."""
        while self.drop_oldest():
            pass

    def _note_use(self, key: bytes) -> None:
        self._texts[key] = self._texts.pop(key)

    def _drop(self, key: bytes) -> None:
        del self._sorted[bisect(self._sorted, key) - 1]
        text = self._texts.pop(key)
        self.slots -= len(text.tokens)
        self._give_back(text.cache)


def _sort_key(tokens: np.ndarray, owner: str) -> bytes:
    """Bytes to sort texts by: by owner, then by tokens, so that the key of a prefix begins the key of the text."""
    return owner.encode() + b"\0" + tokens.astype(">i4").tobytes()


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common prefix of two lists of token ids.

    Args:
        one, other: token ids, one-dimensional.
    """
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
