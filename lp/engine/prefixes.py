"""Prefix reuse: the KV caches of texts that have ended, kept until their slots are needed for other texts.

A text is a prompt and the tokens that were generated behind it. An editor sends the same file after every keystroke,
and a chat its whole past with every message: the prefix that a prompt shares with an earlier text is copied from that
text's cache instead of being computed, which is exact, since the KV of a token depends only on the tokens before it. A
copy reads as much memory as one plain step, and leaves the earlier text as it was for the next prompt.
The texts are kept in a sorted list, where the one that shares most with a prompt is next to the prompt's own place.
A prompt reuses texts of its own owner alone: else its time to the first token would tell what others have asked.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lp.models.kv_cache import StaticKVCache


@dataclass(frozen=True, eq=False)
class CachedText:
    """A text whose KV is cached, so that a prompt may reuse a prefix of it.

    Attributes:
        tokens: int64 (tokens,), ids of the text's tokens whose KV is cached.
        cache: the cache, which has their KV in its first slots.
        owner: name of the text's owner, whose prompts may reuse it.
    """

    tokens: np.ndarray
    cache: StaticKVCache
    owner: str = ""


class Prefixes:
    """The generated texts that are kept for prefix reuse, with their KV caches; no text is a prefix of another.

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
        """Keep the cache of a text that has ended, or free it if a kept text of the owner begins with its tokens.

        Args:
            tokens: ids of the text's tokens whose KV is cached.
            cache: the text's cache, with as many slots as tokens.
            owner: name of the text's owner.
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
        """Find the text that shares the longest prefix with a prompt.

        Args:
            prompt: ids of the prompt's tokens.
            running: texts that still run, to look at as well.
            owner: name of the prompt's owner; texts of others are passed over.

        Returns:
            The text, and the number of tokens that it shares; None and 0 if no text begins like the prompt.
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
        """Free the cache of the kept text that was used longest ago.

        Args:
            but: a text to keep all the same; None for no exception.

        Returns:
            Whether there was a text to free.
        """
        for key, text in self._texts.items():
            if text is not but:
                self._drop(key)
                return True
        return False

    def clear(self) -> None:
        """Free the caches of all kept texts."""
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
    """Length of the longest common prefix of two texts.

    Args:
        one, other: token ids, one-dimensional.
    """
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
