"""Enforces `uniqueItems` in JSON lists, which a grammar alone can't, by a matcher that remembers earlier items.

The model's grammar allows any items in such lists. A second grammar, of bytes, runs beside it. It marks where such a
list begins, and tells which bytes may follow within an item. A token is forbidden in two cases: it ends an item that is
equal to an earlier item, or it begins or continues an item that can only become equal to an earlier one.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lp.errors import UserError
from lp.sampling.grammar import WORD, Matcher
from lp.sampling.language_checks import MARK
from lp.sampling.schema_rewriting import comparable

MOST_AHEAD = 4096  # places that are looked at to find a way on from an item: there are 1,300 behind 0.0e
ENDS = re.compile(rb'["\d\]}],|true,|false,|null,|\d[.eE][\d.eE+-]*\]')
NUMBER = re.compile(rb"[-\d]")
ODD = b".eE"  # in numbers that are written in several ways
MOST_LOOKED = 10_000  # such places for one mask: some tenths of a second
TEXT, QUOTED, ESCAPED = range(3)  # outside of a string, within one, behind its backslash


class Words:
    """The tokens of a vocabulary sorted by their bytes, to find the tokens that begin with given bytes.

    Args:
        data: the bytes of each token, by token id.
    """

    def __init__(self, data: Sequence[bytes]) -> None:
        self.data = data
        self._order = sorted(range(len(data)), key=data.__getitem__)
        self._sorted = [data[token] for token in self._order]

    def beginning_with(self, prefix: bytes, low: int = 0, high: int | None = None) -> tuple[int, int]:
        """Find the tokens that begin with given bytes: (first index, index after the last) in the sorted vocabulary.

        Args:
            prefix: the bytes that the tokens begin with.
            low, high: search only the sorted vocabulary from index `low` to before `high`; None: up to its end.
        """
        high = len(self._sorted) if high is None else high
        low = bisect_left(self._sorted, prefix, low, high)
        return low, bisect_right(self._sorted, prefix, low, high, key=lambda data: data[: len(prefix)])

    def between(self, low: int, high: int) -> list[int]:
        """Token ids at the indices from `low` to before `high` in the sorted vocabulary."""
        return self._order[low:high]

    def named(self, data: bytes, low: int, high: int) -> list[int]:
        """Ids of the tokens whose bytes are exactly `data`, if they are at indices from `low` to before `high`.

        Indices are those of the sorted vocabulary.
        """
        return self._order[bisect_left(self._sorted, data, low, high) : bisect_right(self._sorted, data, low, high)]

    @cached_property
    def of_several_items(self) -> list[int]:
        """Ids of the tokens that may end an item and continue after it, such as `",`, or may end a number like 1.0."""
        return [token for token, data in enumerate(self.data) if ENDS.search(data)]

    @cached_property
    def with_brackets(self) -> list[int]:
        """Ids of the tokens that can end a list or an object, since their bytes include a `]` or a `}`."""
        return [token for token, data in enumerate(self.data) if b"]" in data or b"}" in data]


class _Items(NamedTuple):
    """The items so far of a list that may have none twice.

    Attributes:
        item: bytes so far of the item under way.
        seen: the items before, in the form in which they compare.
        texts: the items before, as they are written, sorted.
        has_odd_number: whether one of them is a number that can be written in several ways.
    """

    item: bytes = b""
    seen: frozenset[Any] = frozenset()
    texts: tuple[bytes, ...] = ()
    has_odd_number: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the item under way is a number."""
        return bool(NUMBER.match(self.item))

    def next(self) -> _Items | None:
        """The list once the item under way has ended; None if an equal item came before."""
        if not self.item:
            return self
        value = comparable(json.loads(self.item.decode()))
        if value in self.seen:
            return None
        text = _written(self.item)
        at = bisect_left(self.texts, text)
        odd = self.is_number and any(byte in ODD for byte in text)
        return _Items(b"", self.seen | {value}, (*self.texts[:at], text, *self.texts[at:]), self.has_odd_number or odd)


class _State(NamedTuple):
    """A place between two bytes of a JSON text.

    Attributes:
        within: TEXT (outside of strings), QUOTED (in a string) or ESCAPED (behind a string's backslash).
        depth: how many lists and objects are around it.
        lists: (depth of its items, items so far) of each list around it that may have no item twice, the outermost
            first.
    """

    within: int = TEXT
    depth: int = 0
    lists: tuple[tuple[int, _Items], ...] = ()

    @property
    def is_direct(self) -> bool:
        """Whether the place is directly in an item of such a list, and not in a part of the item."""
        return bool(self.lists) and self.lists[-1][0] == self.depth

    def step(self, byte: int, is_unique: bool) -> _State | None:
        """The place behind one more byte, which the grammar allows; None where the byte ends an item that came before.

        Args:
            byte: the next byte.
            is_unique: whether it begins a list that may have no item twice.
        """
        if self.within != TEXT:
            within = QUOTED
            if self.within == QUOTED and byte in b'"\\':
                within = TEXT if byte == ord('"') else ESCAPED
            return _State(within, self.depth, _longer(self.lists, byte))
        if byte in b",]" and self.is_direct:
            *outer, (depth, items) = self.lists
            behind = items.next()
            if behind is None:
                return None
            if byte == ord("]"):
                return _State(TEXT, depth - 1, _longer(outer, byte))
            return _State(TEXT, depth, (*_longer(outer, byte), (depth, behind)))
        if byte == ord(" ") and self.is_direct and not self.lists[-1][1].item:
            return _State(TEXT, self.depth, (*_longer(self.lists[:-1], byte), self.lists[-1]))
        depth = self.depth + (byte in b"[{") - (byte in b"]}")
        begun = ((depth, _Items()),) if is_unique else ()
        return _State(QUOTED if byte == ord('"') else TEXT, depth, (*_longer(self.lists, byte), *begun))

    def telling(self) -> bytes | None:
        """Bytes behind which the item under way may end, or become one that came before; None: any byte may do so."""
        _, items = self.lists[-1]
        if self.within == ESCAPED:
            return None
        if self.within == QUOTED:
            beginning = _beginning(items.item)
            return None if beginning is None else bytes({*b'"\\', *_behind(beginning, items.texts)})
        odd = b"0123456789" if items.has_odd_number else b""
        if not items.item:
            return bytes({*b'-[{" ]', *odd, *_behind(b"", items.texts)})
        if items.is_number and any(byte in ODD or byte == ord("-") for byte in items.item):
            return None
        return bytes({*b",]", *ODD, *odd, *_behind(items.item, items.texts)})


def _longer(lists: Sequence[tuple[int, _Items]], byte: int) -> tuple[tuple[int, _Items], ...]:
    """The lists, with one more byte in the item under way of each."""
    return tuple((depth, _Items(items.item + bytes([byte]), *items[1:])) for depth, items in lists)


def _behind(beginning: bytes, texts: Sequence[bytes]) -> Iterator[int]:
    """The next bytes of the texts that have a beginning, each once."""
    at = bisect_left(texts, beginning)
    while at < len(texts) and texts[at].startswith(beginning):
        following = texts[at][len(beginning) : len(beginning) + 1]
        yield from following
        at = bisect_right(texts, beginning + following, at, key=lambda text: text[: len(beginning) + 1])


def _written(item: bytes) -> bytes:
    """A string with as few escapes as there may be, 0 without a sign; anything else as it is."""
    if not item.startswith(b'"'):
        return b"0" if item == b"-0" else item
    return json.dumps(json.loads(item.decode()), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _beginning(item: bytes) -> bytes | None:
    """A string that has not ended, with as few escapes; None within an escape or a character."""
    if b"\\" not in item:
        return item
    try:
        return _written(item + b'"')[:-1]
    except ValueError:
        return None


class UniqueMatcher:
    """A matcher for a JSON schema's grammar that also forbids repeated items in lists with `uniqueItems`.

    Args:
        inner: matcher for the schema's grammar, which allows any items in such lists.
        marked: llguidance's matcher for a grammar of bytes, with marks where such lists begin; it has read nothing yet.
        words: the bytes of the tokens in the model's vocabulary.
    """

    def __init__(self, inner: Matcher, marked: Any, words: Words) -> None:
        self._inner = inner
        self._marked = marked
        self._words = words
        self._states = [_State()]  # at the beginning, and behind every token
        self._taken: list[int] = []  # bytes of every token
        self._looked = 0  # places, for the mask that is made

    def accept(self, token: int) -> bool:
        self._looked = 0
        if not self._inner.accept(token):
            return False
        state: _State | None = self._states[-1]
        taken = 0
        if not self._inner.ended:
            state, taken = self._walk(self._states[-1], self._words.data[token])
            if state is None or not self._is_alive(state):
                self._marked.rollback(taken)
                self._inner.rollback(1)
                return False
        assert state is not None
        self._states.append(state)
        self._taken.append(taken)
        return True

    def rollback(self, count: int) -> None:
        if count:
            self._inner.rollback(count)
            self._marked.rollback(sum(self._taken[-count:]))
            del self._states[-count:], self._taken[-count:]

    @property
    def ended(self) -> bool:
        return self._inner.ended

    def allowed(self, mask: torch.Tensor) -> None:
        self._inner.allowed(mask)
        if self._inner.ended:
            return
        words = mask.tolist()
        state = self._states[-1]
        self._looked = 0
        for token in self._suspects(state):
            word, bit = divmod(token, WORD)
            if word < len(words) and words[word] >> bit & 1 and self._is_bad(state, token):
                words[word] &= ~(1 << bit)
                mask[word] &= ~(1 << bit) if bit < WORD - 1 else (1 << bit) - 1

    def forced(self) -> list[int]:
        tokens = self._inner.forced()
        taken = 0
        while taken < len(tokens) and self.accept(tokens[taken]):
            taken += 1
        self.rollback(taken)
        return tokens[:taken]

    def _suspects(self, state: _State) -> set[int]:
        """Tokens that might repeat an item, each of which is then looked at; no other token can."""
        suspects = {*self._words.of_several_items}
        if state.lists and (len(state.lists) > 1 or not state.is_direct):
            suspects.update(self._words.with_brackets)
        if state.is_direct:
            self._collect(state, b"", *self._words.beginning_with(b""), suspects)
        return suspects

    def _collect(self, state: _State, prefix: bytes, low: int, high: int, suspects: set[int]) -> None:
        """Find tokens that might repeat an item, among those with a prefix: they spell an earlier one, or end one."""
        telling = state.telling() if state.is_direct else None
        if telling is None:
            suspects.update(self._words.between(low, high))
            return
        mask = _mask(self._marked)
        for byte in (each for each in telling if mask >> each & 1):
            longer = prefix + bytes([byte])
            begin, end = self._words.beginning_with(longer, low, high)
            if begin == end:
                continue
            behind = state.step(byte, False)
            if behind is None:
                suspects.update(self._words.between(begin, end))
                continue
            suspects.update(self._words.named(longer, begin, end))
            self._marked.try_consume_tokens([byte])
            self._collect(behind, longer, begin, end, suspects)
            self._marked.rollback(1)

    def _is_bad(self, state: _State, token: int) -> bool:
        behind, taken = self._walk(state, self._words.data[token])
        bad = behind is None or not self._is_alive(behind)
        self._marked.rollback(taken)
        return bad

    def _walk(self, state: _State, data: bytes) -> tuple[_State | None, int]:
        """The place behind some bytes, and how many of them the grammar of bytes has taken."""
        behind: _State | None = state
        for taken, byte in enumerate(data):
            assert behind is not None
            opens = byte == ord("[") and behind.within == TEXT
            is_unique = opens and bool(_mask(self._marked) >> MARK & 1)
            if self._marked.try_consume_tokens([byte]) != 1:
                return None, taken
            behind = behind.step(byte, is_unique)
            if behind is None:
                return None, taken + 1
        return behind, len(data)

    def _is_alive(self, state: _State) -> bool:
        """Whether the item under way can still become one that did not come before; its parts are not looked at."""
        if not state.is_direct or not state.lists[-1][1].seen:
            return True
        waiting = deque([(state, b"")])
        for _ in range(MOST_AHEAD):
            if not waiting:
                return False
            self._looked += 1
            if self._looked > MOST_LOOKED:
                raise UserError(
                    f"uniqueItems is too hard to follow: more than {MOST_LOOKED} places were looked at for one token; "
                    "bound the items otherwise"
                )
            # A longer string is another one; numbers can be equal however long they are.
            place, path = waiting.popleft() if waiting[0][0].within == TEXT else waiting.pop()
            self._marked.try_consume_tokens([*path])
            mask, telling = _mask(self._marked), place.telling()
            self._marked.rollback(len(path))
            for byte in (each for each in range(256) if mask >> each & 1):
                if telling is not None and byte not in telling:
                    return True
                behind = place.step(byte, False)
                if behind is None:
                    continue
                if (
                    not behind.is_direct
                    or (byte == ord(",") and place.within == TEXT)
                    or len(behind.lists) < len(place.lists)
                ):
                    return True
                waiting.append((behind, path + bytes([byte])))
        return True


def _mask(marked: Any) -> int:
    """The bytes that may follow, and the mark, as bits of one number."""
    return int.from_bytes(marked.compute_bitmask(), "little")
