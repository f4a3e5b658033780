"""Regular expressions as JSON schemas use them: ECMA-262's syntax with flag `u`, which counts code points.

Supported are characters, `.`, classes, the escapes `\\d \\w \\s` (ASCII only, as in ECMA-262, except that `\\s` has all
its spaces) and their negations, `\\t \\n \\r \\f \\v \\0 \\cX \\xHH \\uHHHH \\u{H}`, groups with or without a name,
`|`, the counts `* + ? {n} {n,} {n,m}` (a `?` after a count is ignored, since it does not change what matches), the
anchors `^ $` and Python's `\\A \\Z \\z`, and lookaheads at the beginning of the text. Other lookaheads and
lookbehinds, backreferences, `\\b` and `\\p` raise an error that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from lp.errors import UserError

LAST = 0x10FFFF
MOST_LEVELS = 64  # of groups within groups
MOST_COUNT = 1 << 20
MOST_WAYS = 256  # to match a part, by which of its anchors hold
MOST_JOINED = 1 << 14  # pairs of them that are tried
LOOK = "a look (?= or (?! is taken at the beginning of the text alone, as in ^(?!no); mend the pattern"
Ranges: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chars:
    """Node of a regular expression's syntax tree: matches one character out of a set.

    Attributes:
        ranges: (first, last) code points of each range of characters, both included; sorted.
    """

    ranges: Ranges


@dataclass(frozen=True)
class Seq:
    """Node of a regular expression's syntax tree: parts that follow each other; without parts, the empty text."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Alt:
    """Node of a regular expression's syntax tree: one of several alternatives; without any, it matches nothing."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Repeat:
    """Node of a regular expression's syntax tree: a part that is repeated.

    Attributes:
        part: the repeated part.
        least, most: fewest and most repetitions; if `most` is None, there is no upper limit.
    """

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class And:
    """Syntax-tree node that matches the texts that all of its parts match.

    Patterns have no syntax for it; it is made from lookaheads and JSON schemas.
    """

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Not:
    """Syntax-tree node that matches all texts that its part does not match.

    Patterns have no syntax for it; it is made from lookaheads and JSON schemas.
    """

    part: Node


@dataclass(frozen=True)
class Rule:
    """Syntax-tree node that refers to a grammar rule by its name; it occurs in grammars only, not in patterns."""

    name: str


@dataclass(frozen=True)
class Anchor:
    """Syntax-tree node of a pattern: the beginning (`^`) or the end (`$`) of the text."""

    start: bool


@dataclass(frozen=True)
class Look:
    """Syntax-tree node of a pattern: a lookahead, positive `(?=...)` or negative `(?!...)`."""

    part: Node
    positive: bool


Node: TypeAlias = Chars | Seq | Alt | Repeat | And | Not | Rule | Anchor | Look

EMPTY = Seq()


def united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Merge ranges of code points: sorted, joined if they touch, without surrogates (which are no characters).

    Args:
        ranges: (first, last) code points of each range, both included, in any order.
    """
    parts: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        for first, last in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if first > last:
                continue
            if parts and first <= parts[-1][1] + 1:
                parts[-1] = (parts[-1][0], max(parts[-1][1], last))
            else:
                parts.append((first, last))
    return tuple(parts)


def inverted(ranges: Ranges) -> Ranges:
    """Ranges of code points, both ends included, that cover all characters which the given ranges do not cover."""
    bounds = [-1, *(bound for part in united(ranges) for bound in part), LAST + 1]
    return united((bounds[at] + 1, bounds[at + 1] - 1) for at in range(0, len(bounds), 2))


DIGITS: Ranges = ((48, 57),)
WORDS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACES: Ranges = united(
    [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
    + [(code, code) for code in (0x202F, 0x205F, 0x3000, 0xFEFF)]
)
CLASSES = {"d": DIGITS, "w": WORDS, "s": SPACES}
CLASSES |= {name.upper(): inverted(ranges) for name, ranges in CLASSES.items()}
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
DOT = Chars(inverted(((10, 10), (13, 13), (0x2028, 0x2029))))
ANY = Chars(inverted(()))
ANYTHING = Repeat(ANY, 0, None)


def literal(text: str) -> Node:
    """Make the syntax tree that matches one given text and nothing else."""
    return Seq(tuple(Chars(((ord(each), ord(each)),)) for each in text))


def whole(pattern: str) -> Node:
    """Parse a pattern into the syntax tree that matches a text if the pattern matches the whole text.

    Args:
        pattern: a regular expression, see `lp.sampling.regex_syntax` for the syntax.

    Raises:
        ValueError: the pattern has an error or unsupported syntax; the message says where.
    """
    return _language(_Parser(pattern).parse(), ends_are_open=False)


def found(pattern: str) -> Node:
    """Parse a pattern into the syntax tree that matches a text if the pattern matches anywhere in it.

    JSON schemas use `pattern` in this way.

    Args:
        pattern: a regular expression, see `lp.sampling.regex_syntax` for the syntax.

    Raises:
        ValueError: the pattern has an error or unsupported syntax; the message says where.
    """
    return _language(_Parser(pattern).parse(), ends_are_open=True)


def takes_nothing(node: Node) -> bool:
    """Whether an expression without anchors matches the empty text."""
    match node:
        case Seq(parts):
            return all(map(takes_nothing, parts))
        case Alt(parts):
            return any(map(takes_nothing, parts))
        case Repeat(part, least, _):
            return least == 0 or takes_nothing(part)
        case And(parts):
            return all(map(takes_nothing, parts))
        case Not(part):
            return not takes_nothing(part)
    return False


# --- from a pattern to its tree


class Reader:
    """Base class of the parsers for regular expressions and EBNF; it parses groups and alternatives, which both have.

    Args:
        text: the text to parse.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._levels = 0

    def _error(self, what: str) -> UserError:
        """The error that says what is not taken, and where in the pattern."""
        raise NotImplementedError

    def _sequence(self) -> Node:
        """Read one alternative: parts one after the other, up to a bar or the end."""
        raise NotImplementedError

    def _peek(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def _skip(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _alternatives(self) -> Node:
        self._levels += 1
        if self._levels > MOST_LEVELS:
            raise self._error(f"groups within more than {MOST_LEVELS} groups")
        parts = [self._sequence()]
        while self._skip("|"):
            parts.append(self._sequence())
        self._levels -= 1
        return parts[0] if len(parts) == 1 else Alt(tuple(parts))


class _Parser(Reader):
    """Reads one pattern."""

    def parse(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._error("a ) that closes nothing")
        return node

    def _error(self, what: str) -> UserError:
        shown = self._text if len(self._text) <= 80 else f"{self._text[:80]}..."
        return UserError(f"{what} at character {self._at} of the pattern {shown!r}; write it without")

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._counted(self._atom()))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _atom(self) -> Node:
        if self._skip("("):
            return self._group()
        if self._skip("["):
            return Chars(self._class())
        if self._skip("."):
            return DOT
        if self._skip("^") or self._skip("\\A"):
            return Anchor(True)
        if self._skip("$") or self._skip("\\Z") or self._skip("\\z"):
            return Anchor(False)
        if self._peek() in "*+?":
            raise self._error(f"nothing to repeat before {self._peek()}")
        if self._peek() == "\\":
            return Chars(self._escape(in_class=False))
        self._at += 1
        code = ord(self._text[self._at - 1])
        return Chars(((code, code),))

    def _group(self) -> Node:
        look = None
        if self._skip("?"):
            if self._skip("=") or self._skip("!"):
                look = self._text[self._at - 1] == "="
            elif self._peek(2) in ("<=", "<!"):
                raise self._error("a look behind (?<= or (?<!, which is not taken,")
            elif self._skip("P<") or self._skip("<"):
                end = self._text.find(">", self._at)
                if end < 0 or not self._text[self._at : end].isidentifier():
                    raise self._error("a group's name that is none")
                self._at = end + 1
            elif not self._skip(":"):
                raise self._error(f"(?{self._peek()}, which is not taken,")
        node = self._alternatives()
        if not self._skip(")"):
            raise self._error("a ( that is not closed")
        return node if look is None else Look(node, look)

    def _counted(self, node: Node) -> Node:
        least, most = 1, 1
        if self._peek() and self._peek() in "*+?":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._peek()]  # type: ignore[assignment]
            self._at += 1
        elif self._peek() == "{" and (counts := self._counts()):
            least, most = counts  # type: ignore[assignment]
        else:
            return node
        if isinstance(node, Anchor | Look):
            raise self._error("an anchor or a look that is repeated")
        self._skip("?")
        if (self._peek() and self._peek() in "*+") or (self._peek() == "{" and self._counts()):
            raise self._error("a count of a count; put the first one into a group")
        return Repeat(node, least, most)

    def _counts(self) -> tuple[int, int | None] | None:
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : max(end, 0)].partition(",")
        if end < 0 or not low.isdecimal() or not low.isascii() or (high and not (high.isdecimal() and high.isascii())):
            if end >= 0 and not low and high.isdecimal():
                raise self._error(f"{{,{high}}}, which means different things to different readers; write {{0,{high}}}")
            return None  # then the brace stands for itself
        least = int(low) if len(low) < 9 else MOST_COUNT + 1
        most = (int(high) if len(high) < 9 else MOST_COUNT + 1) if high else None if comma else least
        if max(least, most or 0) > MOST_COUNT:
            raise self._error(f"a count above {MOST_COUNT}")
        if most is not None and most < least:
            raise self._error(f"the count {{{low},{high}}}, of which the second is less than the first,")
        self._at = end + 1
        return least, most

    def _escape(self, in_class: bool) -> Ranges:
        begin = self._at
        self._at += 1
        letter = self._peek()
        self._at += 1
        if letter in CLASSES:
            return CLASSES[letter]
        if letter == "0" and self._peek().isdecimal():
            raise self._error("an octal escape, which is not taken,")
        if letter in CONTROLS:
            return ((CONTROLS[letter], CONTROLS[letter]),)
        if letter == "b" and in_class:
            return ((8, 8),)
        code = None
        if letter == "c" and self._peek().isalpha() and self._peek().isascii():
            code = ord(self._peek()) % 32
            self._at += 1
        elif letter == "u" and self._skip("{"):
            end = self._text.find("}", self._at)
            code = _hex(self._text[self._at : max(end, self._at)])
            self._at = end + 1
        elif letter in ("x", "u"):
            count = 2 if letter == "x" else 4
            code = _hex(self._peek(count)) if len(self._peek(count)) == count else None
            self._at += count
            if code is not None and 0xD800 <= code < 0xDC00 and self._skip("\\u"):
                low = _hex(self._peek(4)) or 0
                self._at += 4
                code = 0x10000 + (code - 0xD800 << 10) + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else None
        elif letter and not (letter.isalnum() and letter.isascii()):
            code = ord(letter)
        if code is None or code > LAST or 0xD800 <= code < 0xE000:
            self._at = begin
            raise self._error(f"the escape \\{letter}, which is not taken,")
        return ((code, code),)

    def _class(self) -> Ranges:
        negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        begin = self._at
        while not self._skip("]"):
            low = self._class_part(begin)
            high = low
            if self._peek() == "-" and self._peek(2) != "-]":
                self._at += 1
                high = self._class_part(begin)
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or low[0][0] > high[0][0]:
                    raise self._error("a range of a class that is none")
                low = ((low[0][0], high[0][1]),)
            ranges += low
        return inverted(united(ranges)) if negated else united(ranges)

    def _class_part(self, begin: int) -> Ranges:
        if self._at >= len(self._text):
            self._at = begin
            raise self._error("a [ that is not closed")
        if self._peek() == "\\":
            return self._escape(in_class=True)
        self._at += 1
        code = ord(self._text[self._at - 1])
        return ((code, code),)


def _hex(digits: str) -> int | None:
    return int(digits, 16) if digits and all(each in "0123456789abcdefABCDEF" for each in digits) else None


# --- from a tree with anchors and looks to a language


@dataclass(frozen=True)
class _Way:
    """One way to match a part of a pattern, by which of its anchors hold.

    Attributes:
        node: what is matched, without anchors.
        starts: the match begins where the text does.
        ends: the match ends where the text does.
        looks: expressions that the whole text must match.
    """

    node: Node
    starts: bool = False
    ends: bool = False
    looks: tuple[Node, ...] = ()


def _language(tree: Node, ends_are_open: bool) -> Node:
    texts: list[Node] = []
    for way in _ways(tree):
        if way.looks and not (way.starts or not ends_are_open):
            raise UserError(LOOK)
        before = () if way.starts or not ends_are_open else (ANYTHING,)
        behind = () if way.ends or not ends_are_open else (ANYTHING,)
        parts = (*before, way.node, *behind)
        text = Seq(parts) if len(parts) > 1 else way.node
        texts.append(And((text, *way.looks)) if way.looks else text)
    return texts[0] if len(texts) == 1 else Alt(tuple(texts))


def _ways(tree: Node) -> list[_Way]:
    match tree:
        case Anchor(start):
            return [_Way(EMPTY, starts=start, ends=not start)]
        case Look(part, positive):
            ahead: list[Node] = []
            for way in _ways(part):
                if way.starts or way.looks:  # as in (?!^a), which says the same without its anchor
                    way = _Way(way.node, False, way.ends, way.looks)
                text = way.node if way.ends else Seq((way.node, ANYTHING))
                ahead.append(And((text, *way.looks)) if way.looks else text)
            language = ahead[0] if len(ahead) == 1 else Alt(tuple(ahead))
            return [_Way(EMPTY, looks=(language if positive else And((ANYTHING, Not(language))),))]
        case Seq(parts):
            ways = [_Way(EMPTY)]
            for part in parts:
                others = _ways(part)  # once: a group within a group doubles what is read twice
                if len(ways) * len(others) > MOST_JOINED:
                    raise UserError(f"a pattern has more than {MOST_WAYS} ways to be anchored; write it with fewer")
                ways = [joined for one in ways for other in others if (joined := _joined(one, other))]
                if len(ways) > MOST_WAYS:
                    raise UserError(f"a pattern has more than {MOST_WAYS} ways to be anchored; write it with fewer")
            return ways
        case Alt(parts):
            ways = [way for part in parts for way in _ways(part)]
            plain = [way.node for way in ways if way == _Way(way.node)]
            if len(plain) < 2:
                return ways
            return [_Way(Alt(tuple(plain))), *(way for way in ways if way != _Way(way.node))]
        case Repeat(part, least, most):
            ways = _ways(part)
            if all(way == _Way(way.node) for way in ways):
                return [_Way(tree)]
            if most == 1:
                return [*ways, *([_Way(EMPTY)] if least == 0 else [])]
            raise UserError("an anchor or a look within a repeated group is not taken; write the pattern without")
    return [_Way(tree)]


def _joined(one: _Way, other: _Way) -> _Way | None:
    """One way and then another; None where an anchor between them cannot hold."""
    if (other.starts and not takes_nothing(one.node)) or (one.ends and not takes_nothing(other.node)):
        return None
    if other.looks and one.node != EMPTY and (not takes_nothing(one.node) or not other.starts):
        raise UserError(LOOK)
    first = EMPTY if other.starts else one.node
    second = EMPTY if one.ends else other.node
    parts = tuple(
        part for node in (first, second) if node != EMPTY for part in (node.parts if isinstance(node, Seq) else (node,))
    )
    return _Way(
        parts[0] if len(parts) == 1 else Seq(parts),
        one.starts or other.starts,
        one.ends or other.ends,
        one.looks + other.looks,
    )


# --- from a language to llguidance's terminals


def terminal(node: Node, char: Callable[[Ranges], str]) -> str:
    """Write a syntax tree as the right side of a Lark terminal, such as '/[a-z]{1,}/'.

    Args:
        node: the syntax tree, without anchors and lookaheads.
        char: function that writes a set of characters in the syntax of Rust's crate `regex`: `raw`, or `in_json` if the
            terminal matches JSON strings.
    """
    match node:
        case And(parts):
            return "(" + " & ".join(terminal(part, char) for part in parts) + ")"
        case Not(part):
            return f"~({terminal(part, char)})"
        case Alt(parts) if not _is_plain(node):
            return "(" + " | ".join(terminal(part, char) for part in parts) + ")"
        case Seq(parts) if not _is_plain(node):
            return "(" + " ".join(terminal(part, char) for part in parts) + ")"
    return f"/{written}/" if (written := expression(node, char)) else '""'  # of nothing, // begins a remark


def _is_plain(node: Node) -> bool:
    match node:
        case And() | Not() | Rule():
            return False
        case Seq(parts) | Alt(parts):
            return all(map(_is_plain, parts))
        case Repeat(part, _, _):
            return _is_plain(part)
    return True


def expression(node: Node, char: Callable[[Ranges], str]) -> str:
    """Write a syntax tree as a regular expression in the syntax of Rust's crate `regex`.

    Args:
        node: the syntax tree, with nodes of types Chars, Seq, Alt and Repeat only.
        char: function that writes a set of characters: `raw`, or `in_json` if the expression matches JSON strings.
    """
    match node:
        case Chars(ranges):
            return char(ranges)
        case Seq(parts):
            return "".join(expression(part, char) for part in parts)
        case Alt(parts):
            return f"(?:{'|'.join(expression(part, char) for part in parts)})" if parts else NOTHING
        case Repeat(part, least, most):
            inner = expression(part, char)
            return f"(?:{inner}){{{least},{'' if most is None else most}}}" if inner else ""
    raise AssertionError(node)


NOTHING = r"[^\x{0}-\x{10ffff}]"  # matches no character


def raw(ranges: Ranges) -> str:
    """Write a set of characters as a regular expression of Rust's crate `regex`, such as "[a-z]"."""
    if not ranges:
        return NOTHING
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _code(ranges[0][0])
    return "[" + "".join(_code(low) + (f"-{_code(high)}" if high > low else "") for low, high in ranges) + "]"


def _code(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\\\"}


@lru_cache(maxsize=4096)
def in_json(ranges: Ranges) -> str:
    """Write a regular expression that matches the characters of a set in all forms that lp allows in JSON strings.

    ASCII characters are written as json.dumps writes them, other characters directly or as \\u escapes.
    """
    if not ranges:
        return NOTHING
    ways: list[str] = []
    plain = _without(ranges, ((0, 31), (34, 34), (92, 92)))
    if plain:
        ways.append(raw(plain))
    for code in (*range(32), 34, 92):
        if _has(ranges, code):
            ways.append(f"\\\\{SHORT[code]}" if code in SHORT else f"\\\\u00{_any_case(f'{code:02x}')}")
    wide = _within(ranges, 127, 0xFFFF)
    ways += [f"\\\\u{digits}" for low, high in wide for digits in hex_range(f"{low:04x}", f"{high:04x}")]
    for low, high in _within(ranges, 0x10000, LAST):
        ways += _pairs(low, high)
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    return inverted(united([*inverted(ranges), *others]))


def _within(ranges: Ranges, low: int, high: int) -> Ranges:
    return tuple((max(a, low), min(b, high)) for a, b in ranges if a <= high and b >= low)


def _has(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _any_case(digits: str) -> str:
    return "".join(each if each.isdecimal() else f"[{each}{each.upper()}]" for each in digits)


def _digit_class(low: int, high: int) -> str:
    if (low, high) == (0, 15):
        return "[0-9a-fA-F]"
    digits = [_any_case(f"{digit:x}") for digit in range(low, high + 1)]
    return digits[0] if len(digits) == 1 else f"[{''.join(digit.strip('[]') for digit in digits)}]"


def hex_range(low: str, high: str) -> list[str]:
    """Regular expressions that together match the hexadecimal numbers of a range, in lower and upper case.

    Args:
        low, high: the first and the last number of the range, as strings with equally many digits, such as "d800" and
            "dbff".
    """
    if not low:
        return [""]
    first, last = int(low[0], 16), int(high[0], 16)
    if first == last:
        return [_digit_class(first, first) + rest for rest in hex_range(low[1:], high[1:])]
    ways: list[str] = []
    width = len(low) - 1
    if low[1:].strip("0"):
        ways += [_digit_class(first, first) + rest for rest in hex_range(low[1:], "f" * width)]
        first += 1
    tail = []
    if high[1:].strip("f"):
        tail = [_digit_class(last, last) + rest for rest in hex_range("0" * width, high[1:])]
        last -= 1
    if first <= last:
        ways.append(_digit_class(first, last) + "[0-9a-fA-F]" * width)
    return ways + tail


def _pairs(low: int, high: int) -> list[str]:
    """Regular expressions of the \\u surrogate pairs of all characters from `low` to `high`, beyond 0xFFFF."""
    ways: list[str] = []
    one, other = low - 0x10000, high - 0x10000
    while one <= other:
        block = one >> 10
        if one & 0x3FF == 0 and (other + 1) >> 10 > block:  # whole blocks
            last = ((other + 1) >> 10) - 1
            firsts = hex_range(f"{0xD800 + block:04x}", f"{0xD800 + last:04x}")
            seconds = hex_range("dc00", "dfff")
            one = last + 1 << 10
        else:
            end = min(other, (block << 10) + 0x3FF)
            firsts = hex_range(f"{0xD800 + block:04x}", f"{0xD800 + block:04x}")
            seconds = hex_range(f"{0xDC00 + (one & 0x3FF):04x}", f"{0xDC00 + (end & 0x3FF):04x}")
            one = end + 1
        ways.append(f"\\\\u(?:{'|'.join(firsts)})\\\\u(?:{'|'.join(seconds)})")
    return ways


def lengths(node: Node) -> tuple[int, int | None]:
    """The fewest and the most characters of a text that an expression matches.

    If the expression has And, Not or Rule nodes, the fewest may be too low, and the most is None.

    Args:
        node: the expression's syntax tree, without anchors.

    Returns:
        (fewest, most); if most is None, there is no upper limit.
    """
    match node:
        case Chars():
            return 1, 1
        case Seq(parts):
            ends = [lengths(part) for part in parts]
            most = None if any(high is None for _, high in ends) else sum(high or 0 for _, high in ends)
            return sum(low for low, _ in ends), most
        case Alt(parts) if parts:
            ends = [lengths(part) for part in parts]
            most = None if any(high is None for _, high in ends) else max(high or 0 for _, high in ends)
            return min(low for low, _ in ends), most
        case Repeat(part, least, most):
            low, high = lengths(part)
            return low * least, None if most is None or high is None else high * most
        case And(parts):
            return max(lengths(part)[0] for part in parts), None
    return 0, None


def names(node: Node) -> set[str]:
    """Names of the grammar rules that a rule's body refers to."""
    match node:
        case Rule(name):
            return {name}
        case Seq(parts) | Alt(parts) | And(parts):
            return set().union(*map(names, parts)) if parts else set()
        case Repeat(part, _, _) | Not(part):
            return names(part)
    return set()


def joined(parts: Sequence[Node]) -> Node:
    """Join parts that follow each other into one syntax-tree node; a single part is returned as it is."""
    return parts[0] if len(parts) == 1 else Seq(tuple(parts))
