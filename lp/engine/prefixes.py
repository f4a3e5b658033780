"""The caches of texts that have ended, kept until room is needed: a prompt begins behind its longest cached prefix.

An editor sends the same file after every keystroke, and a chat its whole past with every message. What they share with
an earlier text is copied into the new one's cache, to the token, which is exact: the KV of a token is a function of the
tokens before it. A copy reads as much as one plain step, and leaves the earlier text as it was for the next prompt.
In a sorted list, the text that has most in common with a prompt stands beside the place where the prompt would go.
A prompt begins with texts of its own owner alone: how fast it begins would tell what others have asked.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lp.models.kv_cache import StaticKVCache


@dataclass(frozen=True, eq=False)
class CachedText:
    """A text and the cache that holds it.

    Attributes:
        tokens: int64, those whose KV is in the cache.
        cache: holds them in its first slots.
        owner: whose text it is.
    """

    tokens: np.ndarray
    cache: StaticKVCache
    owner: str = ""


class Prefixes:
    """Texts that have ended, with their caches; none is a prefix of another.

    Args:
        give_back: frees a cache's slots.
    """

    def __init__(self, give_back: Callable[[StaticKVCache], None]) -> None:
        self._give_back = give_back
        self._sorted: list[bytes] = []
        self._texts: dict[bytes, CachedText] = {}  # the one not used for longest first
        self.slots = 0  # of all

    def __len__(self) -> int:
        return len(self._texts)

    def keep(self, tokens: Sequence[int], cache: StaticKVCache, owner: str = "") -> None:
        """Keep a cache that holds these tokens, in as many slots, unless another one of the owner begins with them."""
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
        """The owner's text that begins with most of these tokens, and how many; None and 0 where none does.

        Args:
            prompt: token ids.
            running: other texts to look at.
            owner: whose prompt it is.
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
        """Give back the slots of the text that was not used for longest; whether there was one.

        Args:
            but: not this one.
        """
        for key, text in self._texts.items():
            if text is not but:
                self._drop(key)
                return True
        return False

    def clear(self) -> None:
        """Give back every kept cache."""
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
    """Bytes that sort by owner, then as the tokens do, and begin with those of the owner's prefixes."""
    return owner.encode() + b"\0" + tokens.astype(">i4").tobytes()


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts begin with alike."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
