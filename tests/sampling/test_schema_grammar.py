"""JSON schemas: what the grammar takes is what the schema says, judged by the public suite and by jsonschema."""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema, the judge, is not installed")

from lp.errors import UserError  # noqa: E402
from lp.sampling.schema_grammar import schema_to_lark  # noqa: E402
from tests.support.grammar_texts import Texts, drawn_json_schema, drawn_value, spellings  # noqa: E402
from tests.support.json_schema_suite import FOLDER, group_of, judged  # noqa: E402

REFUSED = re.compile(r"^\D+ at #.* not enforced exactly")  # a keyword, its place
DRAWN = 300 if os.environ.get("LP_TEST_LONG") else 60


def texts_of(schema: Any) -> Texts:
    return Texts(schema_to_lark(json.dumps(schema)))


@pytest.mark.skipif(not FOLDER, reason="LP_JSON_SCHEMA_SUITE, the folder of the JSON-Schema-Test-Suite, is not set")
def test_the_public_suite() -> None:
    """No instance that violates its schema is taken; few that follow it are refused: formats, which are enforced."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in judged(Path(FOLDER)):
        counts[group_of(each)][each.verdict] += 1
    print(counts)
    assert sum(each["wrong: taken"] for each in counts.values()) == 0
    assert all(each["wrong: refused"] <= 10 for each in counts.values())
    assert counts["required"]["right"] >= 0.55 * counts["required"].total()


@pytest.mark.parametrize("seed", range(DRAWN))
def test_drawn_schemas(seed: int) -> None:
    """Whatever masks are drawn, a text is JSON and follows its schema; a drawn value is taken if it follows it."""
    rng = random.Random(f"schema-{seed}")
    schema = drawn_json_schema(rng)
    judge = jsonschema.Draft202012Validator(schema)
    values = [drawn_value(rng) for _ in range(16)]
    try:
        texts = texts_of(schema)
    except UserError as error:
        if "no text follows it" in str(error):
            assert not any(map(judge.is_valid, values)), schema
        else:
            assert REFUSED.match(str(error)), (error, schema)
        return
    for _ in range(8):
        text = texts.draw(rng)
        if text is not None:
            value = json.loads(text)
            assert judge.is_valid(value), (text, schema)
            values.append(value)
    for value in values:
        assert any(map(texts.has, spellings(value))) == judge.is_valid(value), (value, schema)


def test_most_drawn_schemas_are_taken() -> None:
    """Or the test above would judge nothing."""
    taken = 0
    for seed in range(60):
        try:
            texts_of(drawn_json_schema(random.Random(f"schema-{seed}")))
            taken += 1
        except UserError as error:
            assert REFUSED.match(str(error)) or "no text follows it" in str(error)
    assert taken > 30


CASES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string", "maxLength": 2}, ['"a\\""', '"\\u00e9é"', '"😀b"', '""'], ['"a\tb"', '"abc"', '"a', "1"]),
    ({"minLength": 2}, ['"ab"', "1", "[]"], ['"a"']),
    ({"pattern": "b"}, ['"abc"', "null"], ['"ac"']),
    ({"pattern": "^[a-z]{1,129}$"}, ['"abc"'], ['""', '"1"']),
    ({"required": ["a"]}, ['{"a": 1}', '{"a": {}, "b": 2}', "[]"], ["{}", '{"b": 1}']),
    (
        {"allOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '"x"'],
    ),
    ({"$ref": "#/$defs/a~1b", "maximum": 3, "$defs": {"a/b": {"type": "integer"}}}, ["3"], ["4", '"a"']),
    ({"enum": [1.50, "é", [1, {"a": None}]]}, ["1.5", '"é"', '"\\u00e9"', '[1, {"a": null}]'], ["1.50", "1"]),
    ({"const": 12345678901234567890123}, ["12345678901234567890123"], ["12345678901234567890124"]),
    ({"exclusiveMinimum": 0.1}, ["0.2", "0.10000000000000002"], ["0.1", "0.1000000000000000000001", "0"]),
    ({"exclusiveMaximum": 1}, ["0.5", "-3"], ["1", "0.99999999999999999999999"]),
    ({"type": "integer", "minimum": -12, "maximum": 105}, ["-12", "0", "99", "105"], ["-13", "106", "1.0", "01"]),
    ({"type": "integer", "multipleOf": 3}, ["-9", "0", "12"], ["13"]),
    ({"not": {"type": "string"}}, ["1", "{}"], ['"x"']),
    ({"not": {"const": "ab"}}, ['"a"', '"abc"', "1"], ['"ab"']),
    (
        {"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["a"]}, "type": "object"},
        ['{"k": 1, "a": 0}', '{"k": 2}', "{}"],
        ['{"k": 1}'],
    ),
    ({"dependentRequired": {"a": ["b"]}}, ['{"b": 1}', '{"b": 1, "a": 2}'], ['{"a": 1}']),
    ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, ["[]", '[1, "a"]'], ['["a"]', "[1, 2]"]),
    ({"contains": {"const": 1}, "type": "array"}, ["[1]", "[2, 1, 3]"], ["[]", "[2]"]),
    ({"contains": {"const": 1}, "maxContains": 1, "type": "array"}, ["[1]", "[0, 1]"], ["[1, 1]", "[]"]),
    ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}, ["[]", "[3, 1]"], ["[1, 1]", "[4]"]),
    (
        {"minProperties": 1, "maxProperties": 2},
        ['{"a": 1}', '{"a": 1, "b": 2}', "5"],
        ["{}", '{"a": 1, "b": 2, "c": 3}'],
    ),
    ({"properties": {"a": True}, "additionalProperties": False}, ["{}", '{"a": 1}'], ['{"b": 1}', '{"\\u0061": 1}']),
    (
        {"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": {"const": 1}},
        ['{"x": null, "y": 1}'],
        ['{"x": 1}'],
    ),
    ({"propertyNames": {"maxLength": 2}}, ['{"ab": 1}'], ['{"abc": 1}']),
    ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, ['{"a": 1}'], ['{"b": 1}']),
    ({"format": "date"}, ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"1900-02-29"', '"x"']),
    ({"const": 1}, ["1", "1.0"], ["1.5", "10", "true", "1.00"]),
    ({"enum": [[0], -2.0, 2.5]}, ["[0]", "[0.0]", "-2.0", "-2", "2.5"], ["[false]", "2.50", "[-0.0]"]),
    ({"type": "integer", "enum": [1, 2]}, ["1", "2"], ["1.0", "3"]),
    ({"allOf": [{"enum": [1, "a"]}, {"type": ["integer", "string"]}]}, ["1", '"a"'], ["1.0"]),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[1, 2]", "[2.0]"], ["[1, 1.0]"]),
    (
        {"type": "array", "uniqueItems": True},
        ["[]", "[1]", "[1, 2]", '[1, "1", true, [1], {"a": 1}, null]', '[[1, 1], {"a": [1, 1]}]', '["a", "ab", "b"]'],
        [
            "[1, 1]",
            "[1, 1.0]",
            "[10, 1e1]",
            '["a", "a"]',
            '["é", "\\u00e9"]',
            "[[], []]",
            '[{"a": 1, "b": 2}, {"b": 2, "a": 1.0}]',
        ],
    ),
    (
        {"items": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}},
        ["[[1], [1]]", "[[1, 2], [2, 1, 0]]", "3"],
        ["[[1, 1]]", "[[1], [0, -0]]", "[[12, 1, 12]]"],
    ),
    (
        {"properties": {"a": {"uniqueItems": True}, "b": {"items": True}}},
        ['{"a": [1, 2], "b": [1, 1]}', '{"a": 1, "c": [[0, 0]]}'],
        ['{"a": [1, 1]}'],
    ),
    ({"const": ""}, ['""'], ['"', '"a"', "1"]),
    ({"enum": ["", "a", 1]}, ['""', '"a"', "1"], ['"', '"b"']),
    ({"const": [{"": ""}]}, ['[{"": ""}]'], ['[{": "}]', '[{"": ""']),
    (
        {"properties": {"": {"type": "null"}}, "required": [""]},
        ['{"": null}', '{"": null, "a": 1}'],
        ["{}", '{": null}'],
    ),
    ({"pattern": "^$"}, ['""'], ['"', '"a"']),
    ({"pattern": "^a{0}$|^b{0,0}c$"}, ['""', '"c"'], ['"', '"a"', '"bc"']),
    ({"not": {"const": ""}}, ['"a"', "1"], ['""', '"']),
    ({"not": {"enum": ["", "a"]}}, ['"b"', "1"], ['""', '"a"']),
    ({"type": "object", "propertyNames": {"const": ""}}, ["{}", '{"": 1}'], ['{"a": 1}', '{": 1}']),
    (
        {"patternProperties": {"^$": {"type": "null"}}, "additionalProperties": False},
        ["{}", '{"": null}'],
        ['{"": 1}', '{"a": null}'],
    ),
    ({"type": "array", "uniqueItems": True, "items": {"enum": ["", "a"]}}, ['["", "a"]', '[""]'], ['["", ""]', '["]']),
    ({"anyOf": [True, False]}, ["1e-5", "1e308", "null"], ["NaN", "Infinity", "1e309", "+1"]),
]


@pytest.mark.parametrize("schema, valid, invalid", CASES)
def test_what_schemas_say(schema: Any, valid: list[str], invalid: list[str]) -> None:
    """Keywords were left out without a word, and strings with bounds held raw control characters."""
    texts = texts_of(schema)
    assert [text for text in valid if not texts.has(text)] == []
    assert [text for text in invalid if texts.has(text)] == []


@pytest.mark.parametrize(
    "schema, said",
    [
        (
            {"properties": {"a": {"uniqueItems": True, "items": {"type": "array", "items": {"type": "null"}}}}},
            "uniqueItems at #/properties/a is not enforced exactly of lists that have a schema",
        ),
        ({"uniqueItems": True, "items": {"minimum": 0}}, "uniqueItems at # is not enforced exactly of numbers"),
        ({"uniqueItems": True, "contains": {"const": 1}}, "uniqueItems at # beside contains"),
        ({"items": {"format": "hostname"}}, "format at #/items is 'hostname'"),
        ({"$ref": "http://elsewhere/x"}, "leads to 'http://elsewhere/x' outside of the schema"),
        ({"$ref": "#/$defs/a"}, "no part at #/$defs/a"),
        ({"anyOf": [{"$ref": "#"}]}, "$ref at # leads to itself"),
        ({"pattern": "(?<=a)b"}, "pattern at #: a look behind"),
        ({"not": {"multipleOf": 3}}, "multipleOf at #/not is not enforced exactly"),
        ({"minLength": "a"}, "minLength at # is 'a'; give an integer from 0 on"),
        ({"type": "text"}, "type at # is 'text'; give one or more of"),
        ({"anyOf": []}, "no text follows it"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no text follows it"),
        ({"allOf": [{"pattern": "^a"}, {"pattern": "^b"}], "type": "string"}, "no text follows it"),
        ({"minimum": 3, "maximum": 2, "type": "integer"}, "no text follows it"),
        ({"items": {"multipleOf": 0.5}}, "multipleOf at #/items of a number that is no integer is not enforced"),
        (
            {"items": {"$ref": "#/$defs/half", "minimum": 1}, "$defs": {"half": {"multipleOf": 0.5}}},
            "multipleOf at #/$defs/half of a number that is no integer",
        ),
        ({"type": "integer", "multipleOf": 0.5}, "multipleOf at # of a number that is no integer"),
        (
            {"allOf": [{"multipleOf": 2}, {"maximum": 9}, {"multipleOf": 3}]},
            "multipleOf at #/allOf/0 and #/allOf/2 with another one",
        ),
        ({"items": {"exclusiveMinimum": 1e300}}, "a number at #/items beyond 9007199254740992"),
        ({"items": {"not": {"maximum": 1e300}}}, "a number at #/items/not beyond 9007199254740992"),
        ({"items": {"contains": {"const": 1}, "minItems": 2}}, "contains at #/items beside minItems"),
        ({"prefixItems": [True], "contains": {"const": 1}}, "contains at # beside prefixItems"),
        ({"items": {"minProperties": 2}}, "minProperties at #/items is 2, which"),
        (
            {"items": {"minProperties": 900, "properties": {f"a{n}": {} for n in range(900)}}},
            "minProperties at #/items is 900, which with 0 required names",
        ),
        (
            {"items": {"maxProperties": 900, "properties": {f"a{n}": {} for n in range(900)}}},
            "maxProperties at #/items of 900 names has 406351 states",
        ),
        (
            {"items": {"patternProperties": {f"a{n}": {} for n in range(9)}}},
            "patternProperties at #/items has 9 patterns, of at most 5",
        ),
        ({"items": {"pattern": "(((a{50}){50}){50}){50}"}}, "a pattern at #/items is too large"),
        (
            {"items": {"patternProperties": {"(((a{50}){50}){50}){50}": {"type": "null"}}}},
            "a pattern at #/items is too large",
        ),
        (
            {"items": {"allOf": [{"anyOf": [{"pattern": f"{a}{i}"} for i in range(24)]} for a in "ab"]}},
            "a value at #/items has more than 512 alternatives",
        ),
        ({"items": {"uniqueItems": 1}}, "uniqueItems at #/items is 1; give true or false"),
        ({"uniqueItems": "yes"}, "uniqueItems at # is 'yes'; give true or false"),
        ({"items": {"prefixItems": True}}, "prefixItems at #/items is True; give a list of schemas"),
    ],
)
def test_what_is_refused(schema: Any, said: str) -> None:
    """By its keyword and its place; and what no value follows would end in the middle of a text."""
    with pytest.raises(UserError) as refused:
        schema_to_lark(json.dumps(schema))
    assert said in str(refused.value)


def pydantic_models() -> Iterator[tuple[Any, list[Any]]]:
    """(a type, values of it)."""
    import datetime
    from decimal import Decimal
    from enum import Enum
    from typing import Annotated, Literal
    from uuid import UUID

    from pydantic import BaseModel, ConfigDict, Field, RootModel

    class Colour(Enum):
        RED = "red"
        BLUE = 2

    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: Annotated[int, Field(gt=0, le=9)]

    class Dog(BaseModel):
        model_config = ConfigDict(extra="forbid")
        kind: Literal["dog"]
        name: Annotated[str, Field(min_length=1, max_length=5, pattern="^[a-z]+$")]

    class Tree(BaseModel):
        value: float
        children: list[Tree] = []

    class All(BaseModel):
        pet: Annotated[Cat | Dog, Field(discriminator="kind")]
        colours: set[Colour] = Field(min_length=1)
        tree: Tree | None = None
        pair: tuple[int, str]
        prices: dict[Annotated[str, Field(pattern="^[a-z]$")], Annotated[int, Field(multiple_of=5, lt=100)]]
        day: datetime.date
        at: datetime.datetime
        key: UUID
        amount: Decimal
        ratio: Annotated[float, Field(ge=0, lt=1)]
        tags: set[str]
        ids: Annotated[frozenset[int], Field(min_length=2)]
        few: Annotated[list[bool], Field(min_length=1, max_length=3)]

    cat = {"kind": "cat", "lives": 9}
    full = {
        "pet": cat,
        "colours": ["red", 2],
        "tree": {"value": 0.5, "children": [{"value": 1.0, "children": []}]},
        "pair": [1, "a"],
        "prices": {"a": 5, "b": 95},
        "day": "2026-11-26",
        "at": "2026-11-26T10:00:00Z",
        "key": "12345678-1234-5678-1234-567812345678",
        "amount": "1.50",
        "ratio": 0.0,
        "tags": ["a", "b"],
        "ids": [0, 10, 1],
        "few": [True],
    }
    yield All, [full, full | {"pet": {"kind": "dog", "name": "rex"}, "tree": None}]
    yield Tree, [{"value": -1.5, "children": []}]
    yield RootModel[dict[str, int]], [{}, {"a": 1}]
    yield RootModel[Literal[1, "a", True, None]], [1, "a", True, None]


def test_what_pydantic_emits() -> None:
    """Its models take every drawn text, and every text of its own values is taken."""
    pytest.importorskip("pydantic", reason="pydantic comes with the extra `serve`")
    for number, (model, values) in enumerate(pydantic_models()):
        schema = model.model_json_schema()
        texts = texts_of(schema)
        for value in values:
            assert texts.has(json.dumps(value)), (model, value)
        rng = random.Random(number)
        drawn = [text for text in (texts.draw(rng, 700) for _ in range(20)) if text is not None]
        assert drawn, model
        for text in drawn:
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text
            if "date" not in json.dumps(schema):  # the years of Python's dates begin with 1
                model.model_validate_json(text)
