"""Converts EBNF grammars, as llama.cpp (GBNF) and xgrammar write them, into the Lark syntax of llguidance.

    root ::= "say " word ("," " "? word){0,3}   # a text begins with the rule `root`
    word ::= [a-z]+ | "\\u00e9" | .

llguidance always reads the longest lexeme, whereas EBNF allows any split of a text into parts. So a grammar with a
recursive rule is written with lexemes of one character, which can be split in one way only. A grammar without recursion
becomes a single expression.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lp.errors import UserError
from lp.sampling.lark import Lark, count, to_lark
from lp.sampling.regex_syntax import (
    ANY,
    MOST_COUNT,
    MOST_LEVELS,
    Alt,
    Chars,
    Node,
    Reader,
    Repeat,
    Rule,
    Seq,
    inverted,
    joined,
    names,
    raw,
    united,
)

NAME = re.compile(r"[A-Za-z0-9_.-]+")
HEX = {"x": 2, "u": 4, "U": 8}
ESCAPES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7, "b": 8, "0": 0, "e": 27}


def ebnf_to_lark(text: str) -> Lark:
    """Convert rules in EBNF, as llama.cpp's GBNF writes them, into a grammar in llguidance's Lark syntax.

    Args:
        text: the rules, one below the other. A generated text begins with the rule `root`.

    Raises:
        ValueError: the rules have unsupported syntax (the message names line and column), or a rule is missing.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise UserError("it has no rule `root`, which is where a text begins; name one of its rules so")
    for name, body in rules.items():
        for needed in sorted(names(body)):
            if needed not in rules:
                raise UserError(f"the rule {name!r} needs {needed!r}, which is no rule; write it, or mend its name")
    if needs_itself(rules):
        return to_lark(rules, "root")
    numbers = {name: number for number, name in enumerate(rules)}
    lines = [f"R{numbers[name]}: {_terminal(body, numbers)}" for name, body in rules.items()]
    longest = to_lark(rules, "root").longest
    return Lark("\n".join([f"start: R{numbers['root']}", *lines]), longest)


def needs_itself(rules: Mapping[str, Node]) -> bool:
    """Whether some rule refers to itself, directly or through other rules.

    If none does, all rules together can be written as one regular expression.

    Args:
        rules: the body of each rule, by the rule's name.
    """
    left = {name: names(body) for name, body in rules.items()}
    while left:
        free = [name for name, needed in left.items() if not needed & left.keys()]
        if not free:
            return True
        for name in free:
            del left[name]
    return False


def _terminal(node: Node, numbers: Mapping[str, int]) -> str:
    """The right side of a terminal, which is an expression."""
    match node:
        case Rule(name):
            return f"R{numbers[name]}"
        case Chars(ranges):
            return f"/{raw(ranges)}/"
        case Seq(parts):
            return " ".join(_terminal(part, numbers) for part in parts) if parts else '""'
        case Alt(parts):
            return f"({' | '.join(_terminal(part, numbers) for part in parts)})"
        case Repeat(_, _, 0):
            return '""'
        case Repeat(part, least, most):
            return f"({_terminal(part, numbers)}){count(least, most)}"
    raise AssertionError(node)


class _Parser(Reader):
    """Reads the rules of one grammar."""

    def rules(self) -> dict[str, Node]:
        """Read all rules: what each says, by its name."""
        rules: dict[str, Node] = {}
        self._space()
        while self._at < len(self._text):
            name = self._name()
            self._space()
            if not self._skip("::="):
                raise self._error(f"a rule {name!r} without ::=")
            if name in rules:
                raise self._error(f"a second rule {name!r}")
            self._space()
            rules[name] = self._alternatives()
            self._space()
        return rules

    def _error(self, what: str) -> UserError:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - (self._text.rfind("\n", 0, self._at) + 1) + 1
        return UserError(f"it has {what} at line {line}, column {column}; write it without")

    def _space(self) -> None:
        while self._peek() and (self._peek().isspace() or self._peek() == "#"):
            if self._peek() == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                self._at += 1

    def _name(self) -> str:
        found = NAME.match(self._text, self._at)
        if not found:
            raise self._error(f"{self._peek()!r} where a rule's name should be")
        self._at = found.end()
        return found[0]

    def _begins_a_rule(self) -> bool:
        found = NAME.match(self._text, self._at)
        if not found:
            return False
        at, self._at = self._at, found.end()
        self._space()
        begins = self._text.startswith("::=", self._at)
        self._at = at
        return begins

    def _sequence(self) -> Node:
        parts: list[Node] = []
        self._space()
        while self._peek() and self._peek() not in "|)" and not self._begins_a_rule():
            parts.append(self._counted(self._atom()))
            self._space()
        return joined(parts)

    def _atom(self) -> Node:
        if self._skip("("):
            node = self._alternatives()
            if not self._skip(")"):
                raise self._error("a ( that is not closed")
            return node
        if self._skip('"'):
            parts: list[Node] = []
            while not self._skip('"'):
                code = self._character("a literal")
                parts.append(Chars(united([(code, code)])))
            return Seq(tuple(parts))
        if self._skip("["):
            return self._class()
        if self._skip("."):
            return ANY
        return Rule(self._name())

    def _class(self) -> Node:
        negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        while not self._skip("]"):
            low = high = self._character("a class")
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._character("a class")
                if high < low:
                    raise self._error("a range whose end comes before its beginning")
            ranges.append((low, high))
        return Chars(inverted(united(ranges)) if negated else united(ranges))

    def _character(self, where: str) -> int:
        if not self._peek():
            raise self._error(f"{where} that is not closed")
        self._at += 1
        if self._text[self._at - 1] != "\\":
            return ord(self._text[self._at - 1])
        letter = self._peek()
        self._at += 1
        if letter in HEX:
            digits = self._text[self._at : self._at + HEX[letter]]
            if len(digits) != HEX[letter] or not all(each in "0123456789abcdefABCDEF" for each in digits):
                raise self._error(f"\\{letter} without its {HEX[letter]} hexadecimal digits")
            self._at += HEX[letter]
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self._error(f"\\{letter}{digits}, which is no character,")
            return code
        if letter in ESCAPES:
            return ESCAPES[letter]
        if not letter or letter.isalnum():
            raise self._error(f"the escape \\{letter}, which is not taken,")
        return ord(letter)

    def _counted(self, node: Node) -> Node:
        for _ in range(MOST_LEVELS):
            self._space()
            if self._skip("*"):
                node = Repeat(node, 0, None)
            elif self._skip("+"):
                node = Repeat(node, 1, None)
            elif self._skip("?"):
                node = Repeat(node, 0, 1)
            elif self._peek() == "{":
                node = self._counts(node)
            else:
                return node
        raise self._error(f"more than {MOST_LEVELS - 1} counts of a part")

    def _counts(self, node: Node) -> Node:
        found = re.compile(r"\{\s*(\d{1,8})\s*(?:(,)\s*(\d{1,8})?\s*)?\}", re.ASCII).match(self._text, self._at)
        if not found:
            raise self._error("a { that begins no count, as {3}, {2,} or {0,4},")
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if max(least, most or 0) > MOST_COUNT or (most is not None and most < least):
            raise self._error(f"the count {found[0]}, which is none or above {MOST_COUNT},")
        self._at = found.end()
        return Repeat(node, least, most)
