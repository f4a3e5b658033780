"""Texts of grammars by bytes, without a model; drawn JSON schemas, which people could send."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import torch

from lp.sampling.grammar import Matcher
from lp.sampling.grammar_compiler import LLGrammar
from lp.sampling.language_checks import byte_tokenizer
from lp.sampling.lark import Lark

NAMES = ("a", "b", "id", "é", "")
PATTERNS = ("^$", "^[a-c]+$", "[0-9]", "^x", "b$", "^(?!a)", "^.{2,3}$", r"^\w+-\d{1,2}$")
SCALARS = (
    None,
    True,
    False,
    0,
    1,
    2,
    2.5,
    -3,
    -0.5,
    14,
    0.1,
    10**20,
    1e5,
    "",
    "a",
    "b",
    "x",
    "é",
    "ab",
    "c0-12",
    "b\né",
)
EOS = 256  # of the tokenizer of bytes
ENDS = b'"]},0 '  # drawn more often, or few texts would end


class Texts:
    """Tells which texts a grammar has, and draws some; tokens are bytes.

    Args:
        lark: the grammar, in llguidance's dialect of Lark.
    """

    def __init__(self, lark: Lark | str) -> None:
        lark = Lark(lark, 0) if isinstance(lark, str) else lark
        self._grammar = LLGrammar(byte_tokenizer(), EOS + 1, lark, lark.text)

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text."""
        return self._grammar.matcher([EOS])

    def has(self, text: str) -> bool:
        """Whether a text follows it to its end."""
        matcher = self._grammar.matcher([EOS])
        return all(matcher.accept(byte) for byte in [*text.encode(), EOS])

    def draw(self, rng: random.Random, most: int = 150) -> str | None:
        """A text by drawn masks; None where it is longer.

        Raises:
            AssertionError: nothing may follow a text that has not ended.
        """
        matcher = self._grammar.matcher([EOS])
        text: list[int] = []
        mask = torch.zeros(EOS // 32 + 1, dtype=torch.int32)
        for _ in range(most):
            matcher.allowed(mask)
            words = mask.tolist()
            allowed = [token for token in range(EOS + 1) if words[token // 32] >> token % 32 & 1]
            assert allowed, bytes(text)
            if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
                return bytes(text).decode()
            allowed = [token for token in allowed if token != EOS]
            likely = [token for token in allowed if token in ENDS]
            token = rng.choice(likely if likely and rng.random() < 0.4 else allowed)
            assert matcher.accept(token)
            text.append(token)
        return None


def drawn_json_schema(rng: random.Random, levels: int = 2) -> Any:
    """A schema of draft 2020-12, with siblings of every kind."""
    schema: dict[str, Any] = {}
    types = rng.sample(("null", "boolean", "integer", "number", "string", "array", "object"), rng.randint(1, 2))
    if rng.random() < 0.7:
        schema["type"] = types[0] if len(types) == 1 else types
    for draw in rng.sample(_KEYWORDS, rng.randint(1, 3)):
        schema |= draw(rng, levels)
    if levels == 2 and rng.random() < 0.2:
        schema["$defs"] = {"part": drawn_json_schema(rng, 1)}
        schema["properties"] = schema.get("properties", {}) | {"p": {"$ref": "#/$defs/part", "description": "a part"}}
    return schema


def _inner(rng: random.Random, levels: int) -> Any:
    if levels == 0 or rng.random() < 0.2:
        return rng.choice(
            [True, False, {"type": "integer"}, {"type": "string"}, {"const": 1}, {"enum": ["x", 2.5, None]}]
        )
    return drawn_json_schema(rng, levels - 1)


def _numbers(rng: random.Random, levels: int) -> dict[str, Any]:
    names = rng.sample(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), rng.randint(1, 2))
    bounds = {name: rng.choice([0, 1, -3, 10, 2.5, -0.75, 100, 0.1]) for name in names}
    return bounds | ({"multipleOf": rng.choice([1, 2, 3, 7])} if rng.random() < 0.2 else {})


def _strings(rng: random.Random, levels: int) -> dict[str, Any]:
    drawn: dict[str, Any] = {"minLength": rng.randint(0, 3)} if rng.random() < 0.5 else {"maxLength": rng.randint(1, 5)}
    return drawn | ({"pattern": rng.choice(PATTERNS)} if rng.random() < 0.6 else {})


def _lists(rng: random.Random, levels: int) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for name, value in (
        ("items", _inner(rng, levels)),
        ("prefixItems", [_inner(rng, levels) for _ in range(rng.randint(1, 2))]),
        ("minItems", rng.randint(0, 2)),
        ("maxItems", rng.randint(1, 4)),
        ("contains", _inner(rng, levels)),
        ("uniqueItems", True),
    ):
        if rng.random() < (0.1 if name in ("contains", "uniqueItems") else 0.4):
            drawn[name] = value
    return drawn


def _objects(rng: random.Random, levels: int) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for name, value in (
        ("properties", {each: _inner(rng, levels) for each in rng.sample(NAMES, rng.randint(1, 3))}),
        ("required", rng.sample(NAMES, rng.randint(1, 2))),
        ("additionalProperties", _inner(rng, levels)),
        ("patternProperties", {rng.choice(PATTERNS): _inner(rng, levels)}),
        ("propertyNames", {"maxLength": rng.randint(1, 3)}),
        ("minProperties", rng.randint(0, 2)),
        ("maxProperties", rng.randint(1, 3)),
        ("dependentRequired", {rng.choice(NAMES): [rng.choice(NAMES)]}),
    ):
        if rng.random() < (0.6 if name in ("properties", "required") else 0.15):
            drawn[name] = value
    return drawn


def _constants(rng: random.Random, levels: int) -> dict[str, Any]:
    values = [1, 2.0, -0.5, "a", "b\né", "", True, None, [1], {"a": 1}, {"": ""}, 10**20, 1e5]
    return {"const": rng.choice(values)} if rng.random() < 0.3 else {"enum": rng.sample(values, rng.randint(1, 4))}


def _unions(rng: random.Random, levels: int) -> dict[str, Any]:
    name = rng.choice(("anyOf", "oneOf", "allOf", "not", "if"))
    if name == "not":
        return {name: _inner(rng, levels)}
    if name == "if":
        return {name: _inner(rng, levels), "then": _inner(rng, levels), "else": _inner(rng, levels)}
    return {name: [_inner(rng, levels) for _ in range(rng.randint(1, 3))]}


_KEYWORDS = (_numbers, _strings, _lists, _objects, _objects, _constants, _unions, _unions)


def drawn_value(rng: random.Random, levels: int = 2) -> Any:
    """A value that some drawn schemas take."""
    kind = rng.randrange(4) if levels else 0
    if kind < 2:
        return rng.choice(SCALARS)
    inner = [drawn_value(rng, levels - 1) for _ in range(rng.randint(0, levels + 1))]
    return inner if kind == 2 else dict(zip(rng.sample((*NAMES, "x", "p"), len(inner)), inner, strict=True))


def spellings(value: Any) -> Iterator[str]:
    """Texts of a value, of which a grammar that takes it has one: the order of names is the schema's."""
    match value:
        case list():
            for items in itertools.product(*([*spellings(each)] for each in value)):
                yield f"[{', '.join(items)}]"
        case dict():
            for names in itertools.permutations(value):
                pairs = ([f"{json.dumps(name)}: {text}" for text in spellings(value[name])] for name in names)
                for each in itertools.product(*pairs):
                    yield f"{{{', '.join(each)}}}"
        case int() | float() if value in (2, 1e5) and not isinstance(value, bool):  # the drawn constants have decimals
            yield from (str(int(value)), f"{int(value)}.0")
        case _:
            yield json.dumps(value)
