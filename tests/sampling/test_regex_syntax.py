"""Regular expressions and EBNF: the texts that llguidance takes for them are theirs, by other readers."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from lp.errors import UserError
from lp.sampling.ebnf import ebnf_to_lark
from lp.sampling.number_syntax import number_terminal
from lp.sampling.regex_syntax import ANY, Chars, Repeat, found, in_json, raw, terminal, united, whole
from tests.support.grammar_texts import Texts

PATTERNS = [
    "^a|b$",
    "x$",
    "[0-9]",
    "(^a|b)c$",
    "a(b|$)",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",  # pydantic's, of a Decimal
    "^(?!foo|bar)[a-z]+$",
    r"\Aab\Z",
    "^.$",
    r"^[\w.-]+@\d$",
    r"^(?=.*\d)(?=.*[a-z]).{4,8}$",
    "^$",
    "",
    "^(?:|a)$",
    "^()*a{0}$",
    "^(?:a{0,0}){3}b?$",
    "^(?!$)",
    "^(?=a)",
    r"[\]a-]",
    "^a*?$",
    "^(?:a{2}){1,2}(?P<n>b+)?$",
    r"[^\d\sab]",
    "^[a-z]{1,129}$",
]


def texts_of(pattern: str, anywhere: bool = True) -> Texts:
    node = found(pattern) if anywhere else whole(pattern)
    return Texts(f"start: T\nT: {terminal(node, raw)}")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_anywhere(pattern: str) -> None:
    """Anchors were letters, and every pattern was one of the whole string."""
    rng = random.Random(pattern)
    texts, judge = texts_of(pattern), re.compile(pattern, re.ASCII)
    for _ in range(150):
        text = "".join(rng.choice("ab cfox01.-+@]") for _ in range(rng.randint(0, 7)))
        assert texts.has(text) == bool(judge.search(text)), text


@pytest.mark.parametrize(
    "pattern, taken, refused",
    [
        (r"\Aab\Z", ["ab"], ["ab ", "xab"]),
        ("a{200}", ["a" * 200], ["a" * 199]),
        (r"\w+", ["a_1"], ["é"]),
        (".", ["é", "\U0001f600"], ["\n", "ab"]),
        (r"\u{1F600}|\ud83d\ude01|\x41\cJ", ["\U0001f600", "\U0001f601", "A\n"], ["A"]),
        ("a|b{2}/", ["a", "bb/"], ["b/"]),
        ("(?!a)", [""], ["a", "b"]),
        ("(?!a)b|(?!b)", ["", "b"], ["a"]),
        ("(?!)|a", ["a"], [""]),
        ("(?=)", [""], ["a"]),
    ],
)
def test_regular_expressions_of_whole_texts(pattern: str, taken: list[str], refused: list[str]) -> None:
    texts = texts_of(pattern, anywhere=False)
    assert [text for text in taken if not texts.has(text)] == [text for text in refused if texts.has(text)] == []


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("(", r"a \( that is not closed"),
        ("a)", r"a \) that closes nothing"),
        ("[a", r"a \[ that is not closed"),
        (r"\bа", r"the escape \\b"),
        (r"(a)\1", r"the escape \\1"),
        ("(?<=a)b", "a look behind"),
        ("*a", "nothing to repeat"),
        ("a**", "a count of a count"),
        ("(a$)+", "within a repeated group"),
        ("x(?!y)z", "at the beginning of the text alone"),
        ("a{3,2}", "the second is less"),
        ("a{,3}", "means different things"),
        ("a{99999999}", "a count above"),
        ("[b-a]", "a range of a class"),
    ],
)
def test_what_no_expression_may_have(pattern: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        found(pattern)


@pytest.mark.parametrize(
    "low, high", [(0x7F, 0xD7FF), (0x1F600, 0x1F64F), (0xFFFE, 0x10801), (0x80, 0x10FFFF), (0xE9, 0xE9)]
)
def test_characters_in_json(low: int, high: int) -> None:
    """As they are and by escapes, of which characters beyond 16 bits have two."""
    rng = random.Random(low)
    texts = Texts(f'start: T\nT: "\\"" {terminal(Chars(united([(low, high)])), in_json)} "\\""')
    drawn = [rng.randint(0x80, 0x10FFFF) for _ in range(60)] + [rng.randint(low, high) for _ in range(60)]
    for code in {low, high, low - 1, min(high + 1, 0x10FFFF), *drawn}:
        if not 0xD800 <= code < 0xE000:
            for ascii_alone in (True, False):
                assert texts.has(json.dumps(chr(code), ensure_ascii=ascii_alone)) == (low <= code <= high), hex(code)


def test_any_string_of_json() -> None:
    texts = Texts(f'start: T\nT: "\\"" {terminal(Repeat(ANY, 0, None), in_json)} "\\""')
    every = "".join(map(chr, [*range(0x180), 0x2028, 0xFEFF, 0x1F600]))
    assert texts.has(json.dumps(every)) and texts.has(json.dumps(every, ensure_ascii=False))
    assert not texts.has('"\\ud800"') and not texts.has('"\n"') and not texts.has('"a')


def test_any_number_of_json() -> None:
    """Not one that is read as infinite."""
    texts = Texts(f"start: T\nT: {number_terminal(None, None)}")
    rng = random.Random(0)
    drawn = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300) for _ in range(200)]
    for number in (*drawn, 1.7976931348623157e308, 5e-324, -0.0, 1e16, 12345678901234567890):
        assert texts.has(json.dumps(number)), number
    assert [text for text in ("1e309", "9e308", "01", "1.", ".5", "+1", "NaN", "-Infinity") if texts.has(text)] == []


LLAMA_JSON = r"""root   ::= object  # as it comes with llama.cpp
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def test_the_grammar_of_json_that_clients_send() -> None:
    texts = Texts(ebnf_to_lark(LLAMA_JSON))
    assert texts.has('{"a": [1, 2.5e3, {"b": "x\\n\\u00e9 é"}], "c": true}') and texts.has("{}")
    assert [text for text in ('{"a" 1}', "[1]", '{"a": 01}', '{"a": "\t"}', '{"a": 1') if texts.has(text)] == []


@pytest.mark.parametrize(
    "rules",
    [
        'root ::= ("a" | "aa") ("a" | "c")',
        'root ::= x y\nx ::= "a" | "aab" | x "b"\ny ::= [a-b]{1,2} | "c" root?',
        'root ::= "a" root "b" | "" | "c" root',
        'root ::= [a-b]* "a" | ("ab"+ "c")?',
        'root ::= x{0,2} x\nx ::= "a" | "b" x | "ab"',
        'root ::= "" | ("" | "a") "b"{0} "c"{0,0}',
        'root ::= "a"{0} | "a" root{0} | "b" root{0,0} | "c" root',
    ],
)
def test_rules_take_every_split_of_a_text(rules: str) -> None:
    """llguidance looks for the longest lexeme: "aa" was no text of ("a" | "aa") ("a" | "c")."""
    texts = Texts(ebnf_to_lark(rules))
    known = texts_by_rules(rules, 5)
    assert known
    for length in range(6):
        for letters in itertools.product("abc", repeat=length):
            text = "".join(letters)
            assert texts.has(text) == (text in known), text


def texts_by_rules(rules: str, most: int) -> set[str]:
    """All texts of rules up to a length, by putting alternatives in until nothing is new."""
    bodies = {}
    for line in rules.splitlines():
        name, body = line.split(" ::= ")
        bodies[name] = body.replace("{", "{{").replace("}", "}}")
    known: dict[str, set[str]] = {name: set() for name in bodies}
    every = ["".join(each) for length in range(most + 1) for each in itertools.product("abc", repeat=length)]
    while True:
        new = {}
        for name, body in bodies.items():
            pattern = re.sub(
                r'"([^"]*)"', lambda literal: f"(?:{literal[1]})", body.replace("{{", "{").replace("}}", "}")
            )
            for other, texts in known.items():
                either = "|".join(sorted(texts, key=len, reverse=True)) if texts else "(?!)"
                pattern = re.sub(rf"(?<![\w(?:]){other}(?!\w)|(?<=[(]){other}(?!\w)", f"(?:{either})", pattern)
            judge = re.compile(pattern.replace(" ", ""))
            new[name] = {text for text in every if judge.fullmatch(text)}
        if new == known:
            return known["root"]
        known = new


@pytest.mark.parametrize(
    "rules, said",
    [
        ('a ::= "x"', "no rule `root`"),
        ("root ::= a", "needs 'a', which is no rule"),
        ('root ::= "x', "a literal that is not closed"),
        ("root ::= [a", "a class that is not closed"),
        ('root ::= ("x"', r"a \( that is not closed"),
        ('root ::= "\\q"', r"the escape \\q"),
        ('root ::= "x"\nroot ::= "y"', "a second rule 'root' at line 2"),
        ('root ::= "x"{2', "begins no count"),
        ("root ::= root", "no text follows it"),
        ('root ::= "x" root', "no text follows it"),
    ],
)
def test_what_no_rules_may_have(rules: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ebnf_to_lark(rules)
