"""Grammars that would take minutes to read, or fail in a way of their own: they are refused, or read by less work."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from lp.errors import UserError
from lp.sampling.ebnf import ebnf_to_lark
from lp.sampling.regex_syntax import whole
from lp.sampling.schema_grammar import schema_to_lark
from tests.support.grammar_texts import Texts

SECONDS = 30.0  # of the processor; each of these had more than that, most without end


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value, "b": 1, "c": 2}
    return value


@pytest.mark.parametrize(
    "schema",
    [
        {"const": nested(30)},
        {"allOf": [{"enum": [str(i) for i in range(2500)]}, {"enum": [*range(2500), "7"]}]},
        {"type": "array", "uniqueItems": True, "const": [*range(5000)]},
        {"type": "string", "enum": [f"x{i}" for i in range(1000)]},
        {"type": "string", "not": {"enum": [f"x{i}" for i in range(500)]}},
        {"type": "array", "uniqueItems": True, "items": {"enum": [*range(5000)]}},
        {"items": [{"maxProperties": 900, "properties": {f"{j}{k}": {} for k in range(20)}} for j in range(2)]},
        {"type": "object", "maxProperties": 100_000},
    ],
    ids=lambda schema: next(reversed(schema)),
)
def test_large_schemas_are_read(schema: Any) -> None:
    """No form of the work is a product of what the schema has, or doubles with a level."""
    start = time.process_time()
    lark = schema_to_lark(json.dumps(schema))
    assert time.process_time() - start < SECONDS
    assert len(lark.text) < 3_000_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"type": "integer", "const": 1e999999999}', "beyond what a float can be"),
        ('{"minLength": 1e999999999}', "beyond what a float can be"),
        ('{"const": 1e99999999999999999999}', "beyond what a float can be"),
        ('{"minimum": 1' + "0" * 4200 + "}", "4201 characters, of at most 400"),
        (json.dumps({"const": [*range(1500)], "items": {"enum": [*range(1500)]}}), "alternatives that meet"),
        (json.dumps({"allOf": [{"anyOf": [{"pattern": f"^{a}{i}$"} for i in range(200)]} for a in "ab"]}), "meet"),
        (
            json.dumps(
                {"items": [{"maxProperties": 900, "properties": {f"{j}{k}": {} for k in range(20)}} for j in range(90)]}
            ),
            "more than 20000 rules",
        ),
        ('{"format": ["date"]}', "give a string"),
        ('{"prefixItems": 5, "unevaluatedItems": false}', "give a list of schemas"),
        ('{"unevaluatedProperties": false, "$ref": 5}', "give a string"),
        ('{"propertyNames": {"pattern": "^a"}, "properties": {"\\ud800": {}}}', "surrogate pair"),
    ],
    ids=lambda text: text[:40],
)
def test_schemas_that_are_refused(text: str, says: str) -> None:
    """By what is wrong, and at once."""
    start = time.process_time()
    with pytest.raises(UserError, match=says):
        schema_to_lark(text)
    assert time.process_time() - start < SECONDS


def test_objects_of_a_constant_come_in_any_order() -> None:
    """Each of them, whatever is within it."""
    texts = Texts(schema_to_lark(json.dumps({"const": nested(2)})))
    for inner in ('{"a": 1, "b": 1, "c": 2}', '{"c": 2, "a": 1, "b": 1}'):
        assert texts.has(f'{{"b": 1, "a": {inner}, "c": 2}}')
    assert not texts.has('{"b": 1, "a": {"a": 1, "b": 1}, "c": 2}')


def test_strings_that_are_not_among_some() -> None:
    texts = Texts(schema_to_lark('{"type": "string", "not": {"enum": ["a", "bc", 1]}}'))
    assert texts.has('"b"') and texts.has('""') and not texts.has('"a"') and not texts.has('"bc"')


def test_anchors_within_groups() -> None:
    """Each level doubled the time."""
    pattern = "^a"
    for _ in range(30):
        pattern = f"(?:^|a)(?:^{pattern})"
    start = time.process_time()
    assert whole(pattern) == whole("a")
    with pytest.raises(UserError, match="ways to be anchored"):
        whole("(?:" + "|".join(["^a"] * 4000) + ")" + "(?:" + "|".join(["^"] * 4000) + ")")
    assert time.process_time() - start < SECONDS


def test_counts_of_counts_in_ebnf() -> None:
    assert Texts(ebnf_to_lark('root ::= "a"?*+')).has("aaa")
    with pytest.raises(UserError, match="counts of a part"):
        ebnf_to_lark('root ::= "a"' + "*" * 5000)
