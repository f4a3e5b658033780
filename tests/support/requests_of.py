"""Requests drawn from the OpenAPI description of a server: what it takes, and almost that."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
TEXT = st.text("abcdef \n{}<|>é\U0001f600\0", max_size=12)
MOST = 40  # of an integer without a bound: a text of a million tokens shows no more than one of forty
OFTEN = 0.85  # a value is of its schema


def of_schema(schema: dict[str, Any], schemas: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of a JSON schema, as far as pydantic writes them.

    Args:
        schemas: by name, that it may refer to.
    """
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema or "oneOf" in schema:
        return st.one_of(of_schema(each, schemas, depth) for each in schema.get("anyOf") or schema["oneOf"])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    least = schema.get("minimum", schema.get("exclusiveMinimum", -math.inf))
    most = schema.get("maximum", schema.get("exclusiveMaximum", math.inf))
    match schema.get("type"):
        case "string":
            return TEXT
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "integer":
            return st.integers(int(max(least, -2)), int(min(most, MOST)))
        case "number":
            return st.floats(max(least, -1e3), min(most, 1e3))
        case "array":
            fewest = schema.get("minItems", 0)
            return st.lists(of_schema(schema["items"], schemas, depth + 1), min_size=fewest, max_size=fewest + 2)
        case "object" if depth < 4 and "properties" in schema:
            return bodies(schema, schemas, depth)
        case "object":
            return st.dictionaries(st.sampled_from(["0", "7", "60", "type", "a"]), ANYTHING, max_size=3)
    return ANYTHING


def bodies(schema: dict[str, Any], schemas: dict[str, Any], depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of a schema with most of what it requires; some values are of another type, some names of no field."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    fields = {name: of_schema(each, schemas, depth + 1) for name, each in schema["properties"].items()}
    required = {*schema.get("required", ())}

    @st.composite
    def body(draw: Any) -> dict[str, Any]:
        names = draw(st.lists(st.sampled_from([*fields]), max_size=4, unique=True))
        names += [name for name in sorted(required - {*names}) if draw(st.integers(0, 19))]
        made = {}
        for name in names:
            wrong = draw(st.integers(0, 99)) >= 100 * OFTEN
            made[name] = draw(ANYTHING if wrong else fields[name])
        if draw(st.integers(0, 9)) == 0:
            made[draw(st.text(max_size=6))] = draw(ANYTHING)
        return made

    return body()
