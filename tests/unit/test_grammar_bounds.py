"""What a grammar forces: looked for only where it is bounded, or a step would never end."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import lp
from lp.errors import UserError
from lp.models.loader import vocabulary_size
from lp.sampling.grammar_bounds import (
    check_ebnf,
    ebnf_is_bounded,
    is_followed_quickly,
    regex_is_bounded,
    schema_is_bounded,
)

NEEDS_ITSELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
# The rules of JSON that come with llama.cpp.
LLAMA_JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
ITEMS = {"type": "array", "minItems": 50, "items": {"const": 1}}


@pytest.mark.parametrize(
    "schema, bounded",
    [
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"minItems": 9}}}, True),
        (ITEMS, True),
        ({"type": "array", "minItems": 20, "items": ITEMS}, True),
        ({"type": "array", "minItems": 21, "items": ITEMS}, False),
        ({"anyOf": [ITEMS, {"pattern": "((a{50}){50})"}]}, False),
        ({"patternProperties": {"(a{50}){50}": True}}, False),
        ({"type": "array", "minItems": 21, "items": {"$ref": "#/$defs/x~1y"}, "$defs": {"x/y": ITEMS}}, False),
        (NEEDS_ITSELF, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"items": {"$ref": "#/$defs/a"}}}}, False),
        ({"$ref": "#/nowhere"}, False),
        ({"minItems": "many"}, False),
        (True, True),
    ],
)
def test_schemas(schema: Any, bounded: bool) -> None:
    assert schema_is_bounded(json.dumps(schema)) is bounded


@pytest.mark.parametrize(
    "pattern, bounded",
    [
        (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", True),
        (r"(a{20}b){50}", True),
        (r"((a{20}b){50}){2,}", False),
        (r"(?:(?:a{2,50})b){1,50}", False),
        (r"(\(a{50}[)]b{2}){20}", True),
        (r"a{1000000000000}", False),
        (r"a{50}{50}", False),
        (r"[{](a{50}){5}[}{]{50}", True),
    ],
)
def test_regular_expressions(pattern: str, bounded: bool) -> None:
    assert regex_is_bounded(pattern) is bounded


@pytest.mark.parametrize(
    "rules, bounded",
    [
        ('root ::= "root" a b\na ::= [a-z]{4}\nb ::= a? # root', True),
        ('root ::= "x" root', False),
        ('root ::= a\na ::= "(" b ")"\nb ::= a | "x"', False),
        ("root ::= (a){100}\na ::= ([a-z]){100}", False),
    ],
)
def test_rules(rules: str, bounded: bool) -> None:
    assert ebnf_is_bounded(rules) is bounded


@pytest.mark.parametrize(
    "kind, text, quickly",
    [
        ("regex", r"([\w.-]+@[a-z]+, ){20}[^b]{1000}", True),
        ("regex", r"((([^b])*){1000})+", False),
        ("regex", r"((([^b]){0,3}){5,}){1000}", False),
        ("regex", r"((((([^b]|^))?)*){5,}){0,3}", False),
        ("regex", r"(?:\d{1,3},? ?){20}(-?\d+(\.\d+)?([eE][-+]?\d+)?)?", True),
        ("json_schema", '{"items": [{"pattern": "((a{50}){50}"}]}', False),
        ("json_schema", '{"patternProperties": {"((a{50}){50}": {}}, "minItems": 9000}', False),
        ("json_schema", '{"pattern": "^[a-z]+$", "properties": {"pattern": {"type": "string"}}}', True),
        ("ebnf", 'root ::= a* b*\na ::= "x"+ b+\nb ::= c+ d*\nc ::= [a-z]+\nd ::= a', True),
        ("ebnf", "root ::= a{100}\na ::= [a-z]{100}", False),
        ("ebnf", LLAMA_JSON, True),
        ("ebnf", "root ::= (([a-z])*){200}", False),
    ],
)
def test_what_is_hard_to_follow(kind: str, text: str, quickly: bool) -> None:
    """One look at the tokens that may follow took a minute, in which no other text went on."""
    assert is_followed_quickly(kind, text) is quickly


@pytest.mark.parametrize("text", ["[" * 32_000, "[\\\n" * 10_000, "[" * 32_000 + "\\"])
def test_classes_that_are_not_closed_are_looked_at_once(text: str) -> None:
    """The end of each was looked for up to that of the text: no other thread had a turn for seconds."""
    began = time.thread_time()
    regex_is_bounded(text)
    is_followed_quickly("regex", text)
    is_followed_quickly("ebnf", f"root ::= {text}")
    assert time.thread_time() - began < 1.0


def test_a_count_beyond_all_floats() -> None:
    """It was an OverflowError, of a server an error of its own."""
    assert not schema_is_bounded(f'{{"type": "array", "minItems": 1{"0" * 400}}}')


@pytest.mark.parametrize(
    "rules", ["root ::= root{1}", 'root ::= "x"\na ::= (a){3,}', 'root ::= a\na ::= b{2}\nb ::= (a | "{"){0,3}']
)
def test_a_count_of_itself_is_refused(rules: str) -> None:
    """The compiler ended the process, and with it the server and all its texts."""
    with pytest.raises(UserError, match="needs itself, and has a count"):
        check_ebnf(rules)


def test_rules_that_need_themselves_are_taken() -> None:
    """Those of JSON do; counts of other rules and braces in literals are no fault."""
    check_ebnf('root ::= value{2}\nvalue ::= "{" value "}" | [{}] | hex # {3}\nhex ::= [0-9]{4}')


@pytest.mark.parametrize("kind, text", [("ebnf", 'root ::= "x" root'), ("json_schema", json.dumps(NEEDS_ITSELF))])
def test_a_text_without_end(kind: str, text: str) -> None:
    """The first step looked for all that must follow, for ever."""
    pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")
    model, tokenizer = lp.load("demo")
    grammar = getattr(lp.GrammarCompiler(tokenizer, vocabulary_size(model)), kind)(text)
    output = lp.LookaheadDecoder(model).generate([1, 2], 12, grammar=grammar)
    assert len(output.tokens) == 12
    assert output.tokens == lp.PlainDecoder(model).generate([1, 2], 12, grammar=grammar).tokens
