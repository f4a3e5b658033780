"""Writes grammars in llguidance's Lark syntax; rules that no text can follow are left out."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lp.errors import UserError
from lp.sampling.language_checks import MARK, has_no_text
from lp.sampling.regex_syntax import EMPTY, Alt, Chars, Node, Repeat, Rule, Seq, raw

MOST_RULES = 20_000
MOST_ROUNDS = 64


@dataclass(frozen=True)
class Lexeme:
    """A part of a grammar rule that llguidance's lexer reads in one piece, always as the longest text that matches.

    Attributes:
        right_side: what the lexeme matches, written as the right side of a Lark terminal.
        length: number of characters of the shortest text that it matches.
    """

    right_side: str
    length: int


@dataclass(frozen=True)
class Unique:
    """A part of a grammar rule: alternatives in any order, each at most once.

    It stands for the items of a JSON list with `uniqueItems`, if few values are allowed.

    Attributes:
        parts: the alternatives, each a sequence of rule parts.
        between: the separator between two alternatives, such as a comma.
        least, most: fewest and most alternatives that may come.
    """

    parts: tuple[tuple[Part, ...], ...]
    between: Lexeme
    least: int
    most: int


@dataclass(frozen=True)
class Mark:
    """A mark in a grammar where a list of unique items begins; `lp.sampling.unique_items` forbids repetitions there."""


Part = Node | Lexeme | Unique | Mark


class Lark(NamedTuple):
    """A grammar in llguidance's Lark syntax.

    Attributes:
        text: the grammar.
        longest: upper bound on the number of characters that the grammar may force one after the other; may be
            infinite.
        marked: the grammar with an extra token at each `Mark`; "" if the grammar has no marks.
    """

    text: str
    longest: float
    marked: str = ""


def to_lark(rules: Mapping[str, Part], root: str) -> Lark:
    """Write grammar rules in llguidance's Lark syntax.

    Args:
        rules: the body of each rule, by the rule's name.
        root: name of the rule with which a text begins.

    Raises:
        ValueError: no text can follow the rules, or there are too many rules.
    """
    if len(rules) > MOST_RULES:
        raise UserError(f"the grammar has {len(rules)} rules, of at most {MOST_RULES}; ask for less of the form")
    writer = _Writer(rules)
    if root not in writer.lengths:
        raise UserError("no text follows it: what it demands cannot be; mend it")
    text = writer.text(root)
    return Lark(text, writer.longest(root), writer.text(root, with_marks=True) if writer.has_marks else "")


class _Writer:
    """Writes rules as Lark.

    Attributes:
        lengths: characters of the shortest text, for every rule that has a text.
        has_marks: whether a rule that was written has a mark.
    """

    def __init__(self, rules: Mapping[str, Part]) -> None:
        self._rules = rules
        self.has_marks = False
        self._with_marks = False
        self._terminals: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        self._extra: list[str] = []
        self.lengths: dict[str, float] = {}
        users: dict[str, list[str]] = {}
        for name, body in rules.items():
            for needed in _needed(body):
                users.setdefault(needed, []).append(name)
        waiting = OrderedDict.fromkeys(rules)  # a dict looks for its first one behind all that were deleted
        rounds = dict.fromkeys(rules, 0)  # of a rule within itself, whose shortest text is found by and by
        while waiting:
            name, _ = waiting.popitem(last=False)
            length = self.length(rules[name])
            if length < self.lengths.get(name, math.inf):
                self.lengths[name] = length
                rounds[name] += 1
                if rounds[name] < MOST_ROUNDS:
                    waiting.update(dict.fromkeys(users.get(name, [])))

    def length(self, part: Part) -> float:
        """Characters of the shortest text; infinite for none."""
        match part:
            case Rule(name):
                return self.lengths.get(name, math.inf)
            case Lexeme(right_side, length):
                return math.inf if "&" in right_side and has_no_text(right_side) else length
            case Mark():
                return math.inf  # it is no text
            case Chars(ranges):
                return 1 if ranges else math.inf
            case Seq(parts):
                return sum(map(self.length, parts))
            case Alt(parts):
                return min(map(self.length, parts), default=math.inf)
            case Repeat(inner, least, _):
                return least * self.length(inner) if least else 0
            case Unique(parts, _, least, _):
                lengths = sorted(sum(map(self.length, each)) for each in parts)
                return math.inf if len(lengths) < least else sum(lengths[:least])
        raise AssertionError(part)

    def longest(self, root: str) -> float:
        """How many characters may have to follow: the most of a rule's alternatives, each by its shortest text."""
        return max(self._ahead(self._rules[name]) for name in self._reached(root))

    def _ahead(self, part: Part) -> float:
        match part:
            case Alt(parts):
                return max((self._ahead(each) for each in parts if self.length(each) < math.inf), default=0)
            case Seq(parts):
                return sum(self._ahead(each) if not isinstance(each, Rule) else self.length(each) for each in parts)
            case Repeat(inner, least, _):
                return max(least, 1) * self._ahead(inner) if self.length(inner) < math.inf else 0
        return self.length(part)

    def _reached(self, root: str) -> list[str]:
        reached = {root: None}
        waiting = [root]
        while waiting:
            for name in _needed(self._rules[waiting.pop()]):
                if name in self.lengths and name not in reached:
                    reached[name] = None
                    waiting.append(name)
        return list(reached)

    def text(self, root: str, with_marks: bool = False) -> str:
        """The Lark of all rules that the root needs, with marks or without."""
        self._with_marks = with_marks
        self._terminals, self._extra = {}, []
        self._numbers = {name: number for number, name in enumerate(self._reached(root))}
        lines = [f"start: r{self._numbers[root]}"]
        lines += [f"r{number}: {self._written(self._rules[name])}" for name, number in self._numbers.items()]
        lines += self._extra
        lines += [f"{name}: {right_side}" for right_side, name in self._terminals.items()]
        return "\n".join(lines)

    def _written(self, part: Part) -> str:
        match part:
            case Rule(name):
                return f"r{self._numbers[name]}"
            case Lexeme(right_side, _):
                if right_side.startswith("%json"):
                    return right_side
                return self._terminals.setdefault(right_side, f"T{len(self._terminals)}")
            case Chars(ranges):
                return f"/{raw(ranges)}/"
            case Seq(parts):
                return " ".join(map(self._written, parts)) if parts else '""'
            case Alt(parts):
                living = [each for each in parts if self.length(each) < math.inf]
                marks = [each for each in parts if isinstance(each, Mark)]
                self.has_marks |= bool(marks)
                living += marks if self._with_marks else []
                return f"({' | '.join(map(self._written, living))})"
            case Mark():
                return f"<[{MARK}]>"
            case Repeat(inner, least, most):
                if most == 0 or self.length(inner) == math.inf:
                    return self._written(EMPTY)
                return f"({self._written(inner)}){count(least, most)}"
            case Unique():
                return self._unique(part)
        raise AssertionError(part)

    def _unique(self, part: Unique) -> str:
        """Extra rules for a `Unique`, which count in bits the alternatives that came; returns how to begin them."""
        name = f"u{len(self._extra)}"
        end = [f'"" %if bit_count_ge(_, {part.least})']
        between = self._written(part.between)
        lines = {"first": "" if part.least else '""', "next": ""}
        for index, each in enumerate(part.parts):
            written = " ".join(map(self._written, each))
            if part.most:
                lines["first"] += f"{' | ' if lines['first'] else ''}{written} {name}::set_bit({index})"
            may_come = f"and(bit_clear({index}), bit_count_lt(_, {part.most}))"
            end.append(f"{between} {written} {name}::set_bit({index}) %if {may_come}")
        self._extra.append(f"{name}::_ : " + "\n | ".join(end))
        self._extra.append(f"{name}f::_ : {lines['first']}")
        return f"{name}f::0"


def count(least: int, most: int | None) -> str:
    """Write how often a part is repeated, in Lark's syntax, such as "*" or "{2,}".

    Args:
        least, most: fewest and most repetitions; if `most` is None, there is no upper limit.
    """
    if (least, most) in ((0, None), (1, None), (0, 1)):
        return {(0, None): "*", (1, None): "+", (0, 1): "?"}[least, most]
    return f"{{{least},{'' if most is None else most}}}"


def _needed(part: Part) -> set[str]:
    match part:
        case Rule(name):
            return {name}
        case Seq(parts) | Alt(parts):
            return set().union(*map(_needed, parts)) if parts else set()
        case Repeat(inner, _, _):
            return _needed(inner)
        case Unique(parts):
            return set().union(*(_needed(inner) for each in parts for inner in each))
    return set()
