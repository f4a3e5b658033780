"""The caches of texts that have ended, kept until room is needed: a prompt begins behind its longest cached prefix.

An editor sends the same file after every keystroke, and a chat its whole past with every message. What they share with
an earlier text is copied into the new one's cache, to the token, which is exact: the KV of a token is a function of the
tokens before it. A copy reads as much as one plain step, and leaves the earlier text as it was for the next prompt.
There are few enough texts to compare a prompt with each: a tree of their prefixes would save microseconds.
"""

from __future__ import annotations

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
    """

    tokens: np.ndarray
    cache: StaticKVCache


class Prefixes:
    """Texts that have ended, with their caches.

    Args:
        give_back: frees a cache's slots.
    """

    def __init__(self, give_back: Callable[[StaticKVCache], None]) -> None:
        self._give_back = give_back
        self._texts: list[CachedText] = []  # the one not used for longest first

    def __len__(self) -> int:
        return len(self._texts)

    def keep(self, tokens: Sequence[int], cache: StaticKVCache) -> None:
        """Keep a cache that holds these tokens; those that are a prefix of them are of no more use."""
        text = CachedText(np.array(tokens, np.int64), cache)
        for other in [*self._texts]:
            if common(other.tokens, text.tokens) == len(other.tokens):
                self._drop(other)
        self._texts.append(text)

    def longest(self, prompt: Sequence[int], running: Iterable[CachedText] = ()) -> tuple[CachedText | None, int]:
        """The text that begins with most of these tokens, and how many; None and 0 where none does.

        Args:
            prompt: token ids.
            running: other texts to look at.
        """
        tokens = np.array(prompt, np.int64)
        found, most = None, 0
        for text in [*self._texts, *running]:
            if (count := common(text.tokens, tokens)) > most:
                found, most = text, count
        if found in self._texts:
            self._texts.remove(found)
            self._texts.append(found)
        return found, most

    def holds(self, text: CachedText | None) -> bool:
        """Whether it is one of these."""
        return text in self._texts

    def drop_oldest(self, but: CachedText | None = None) -> bool:
        """Give back the slots of the text that was not used for longest; whether there was one.

        Args:
            but: not this one.
        """
        for text in self._texts:
            if text is not but:
                self._drop(text)
                return True
        return False

    def clear(self) -> None:
        """Give back all."""
        while self.drop_oldest():
            pass

    def _drop(self, text: CachedText) -> None:
        self._texts.remove(text)
        self._give_back(text.cache)


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts begin with alike."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
