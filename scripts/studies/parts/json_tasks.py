"""Drawn tasks that ask for JSON: a schema, texts that follow it, and a prompt that shows some of them."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

Schema = dict[str, Any]
FIELDS = ["name", "size", "path", "is_open", "line count", "owner", "mode", "created_at", "tags", "naïve"]
WORDS = ["red", "green", "dark blue", "main", "utils", "config", "open", "closed", "a_b", "x1", "größe"]
MOST_DEPTH = 2
OPTIONAL = 0.3  # of fields, those that may be left out
NULL: Schema = {"type": "null"}


class JsonTask(NamedTuple):
    """A task that asks for JSON: the schema that an answer follows, and the prompt that shows such texts."""

    schema: Schema
    prompt: str


def drawn_task(draws: random.Random, shown: int = 1) -> JsonTask:
    """Draw a task: an object is asked for behind others of its schema, one a line.

    Args:
        draws: source of the random numbers.
        shown: number of objects in the prompt.
    """
    schema = drawn_schema(draws, 3, 6)
    values = [drawn_value(schema, draws, schema["$defs"]) for _ in range(shown)]
    lines = [json.dumps(value, ensure_ascii=False) for value in values]
    return JsonTask(schema, "\n".join(["# Records, one JSON object a line.", *lines, ""]))


def drawn_schema(draws: random.Random, least: int = 1, most: int = 4) -> Schema:
    """A schema of an object, with a definition that parts of it refer to.

    Args:
        draws: where it comes from.
        least, most: fewest and most fields that the object has.
    """
    schema = _object(draws, draws.randint(least, most), 0)
    return {**schema, "$defs": {"item": _leaf(draws)}}


def drawn_value(schema: Schema, draws: random.Random, defs: Schema) -> Any:
    """A value that follows a drawn schema.

    Args:
        schema: a part of what `drawn_schema` gives.
        draws: where it comes from.
        defs: the schema's definitions, by name.
    """
    if "$ref" in schema:
        return drawn_value(defs[schema["$ref"].rpartition("/")[2]], draws, defs)
    if "anyOf" in schema:
        return drawn_value(draws.choice(schema["anyOf"]), draws, defs)
    if "enum" in schema:
        return draws.choice(schema["enum"])
    match schema["type"]:
        case "integer":
            return draws.randint(schema["minimum"], schema["maximum"])
        case "number":
            return round(draws.uniform(-99, 99), 2)
        case "boolean":
            return draws.random() < 0.5
        case "null":
            return None
        case "string":
            return draws.choice(WORDS)[: schema["maxLength"]]
        case "array":
            return [drawn_value(schema["items"], draws, defs) for _ in range(draws.randint(0, schema["maxItems"]))]
    return {
        name: drawn_value(part, draws, defs)
        for name, part in schema["properties"].items()
        if name in schema["required"] or draws.random() < 0.5
    }


def _object(draws: random.Random, fields: int, depth: int) -> Schema:
    names = draws.sample(FIELDS, fields)
    required = [name for name in names if draws.random() >= OPTIONAL]
    properties = {name: _any(draws, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _any(draws: random.Random, depth: int) -> Schema:
    kinds = ["leaf"] * 4 + ["ref", "anyOf"] + ["array", "object"] * (depth <= MOST_DEPTH)
    match draws.choice(kinds):
        case "array":
            return {"type": "array", "items": _any(draws, depth + 1), "maxItems": 3}
        case "object":
            return _object(draws, draws.randint(1, 3), depth)
        case "anyOf":
            return {"anyOf": [_leaf(draws), NULL]}
        case "ref":
            return {"$ref": "#/$defs/item"}
    return _leaf(draws)


def _leaf(draws: random.Random) -> Schema:
    most = draws.choice([9, 500])
    return draws.choice(
        [
            {"type": "integer", "minimum": draws.choice([0, -20]), "maximum": most},
            {"type": "number"},
            {"type": "boolean"},
            {"enum": draws.sample(WORDS, 3)},
            {"enum": [1, "two", None]},
            {"type": "string", "maxLength": draws.choice([4, 12])},
        ]
    )
