"""A JSON schema as a document whose parts are addressed by JSON pointers, such as "#/properties/age".

It also finds the parts that references lead to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from lp.errors import UserError

ONE: tuple[str, ...] = (
    "additionalProperties",
    "items",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "additionalItems",
)
ONE += ("unevaluatedItems", "unevaluatedProperties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies")
DRAFTS = ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06", "draft-04")
MOST_LEVELS = 64  # of schemas within others
MOST_JSON_LEVELS = 256
MOST_DIGITS = 400  # of a number, and its largest exponent: floats end at 1e308


class Written(Decimal):
    """A number with decimals or an exponent: its exact value, and its text in the schema.

    Attributes:
        text: the number as the schema writes it, such as "1.50".
    """

    text: str

    def __new__(cls, text: str) -> Written:
        made = super().__new__(cls, text)
        made.text = text
        return made


class UnplacedError(UserError):
    """Refusal of a keyword, raised where the keyword's place in the schema is unknown; a caller adds it with `at`.

    Args:
        what: the keyword, or the kind of value, that is refused.
        why: the reason, and what the user can do.
    """

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why

    def __str__(self) -> str:
        return f"{self.what} {self.why}"

    def at(self, *places: str) -> UserError:
        """Make the error for the user, whose message names the keyword's places in the schema.

        Args:
            places: JSON pointers to the parts of the schema that the keyword comes from.
        """
        return UserError(f"{self.what} at {' and '.join(places)} {self.why}")


class Document:
    """A JSON schema whose parts and references are looked up by JSON pointer, such as "#/properties/age".

    Args:
        text: the schema as JSON text.

    Attributes:
        root: the whole schema as Python data.
        dynamic: JSON pointers to the parts that have a $dynamicAnchor, by the anchor's name.

    Raises:
        ValueError: the text is no JSON, or no schema.
    """

    def __init__(self, text: str) -> None:
        try:
            self.root = json.loads(text, parse_float=_written, parse_int=_integer, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise UserError(f"it is no JSON ({error}); mend it") from None
        if not isinstance(self.root, Mapping | bool):
            raise UserError(f"it is {text[:40]}; give an object, true or false")
        _check_parts(self.root)
        self._bases: dict[str, str] = {}  # by pointer of a part
        self._resources: dict[str, str] = {}  # pointer by URI
        self._anchors: dict[tuple[str, str], str] = {}
        self.dynamic: dict[str, list[str]] = {}  # pointers of the parts with a $dynamicAnchor, by its name
        self._read(self.root, "#", "")
        self._resources.setdefault("", "#")
        declared = self.root.get("$schema") if isinstance(self.root, Mapping) else None
        if declared is not None and not any(draft in str(declared) for draft in DRAFTS):
            raise UserError(f"$schema at # is {declared!r}, whose keywords are not known; leave it out")

    def at(self, pointer: str) -> Any:
        """Get the part of the schema at a JSON pointer, as Python data.

        Raises:
            ValueError: the schema has no such part.
        """
        part = self.root
        for step in pointer.split("/")[1:]:
            name = unescaped(step)
            if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
                part = part[int(name)]
            elif isinstance(part, Mapping) and name in part:
                part = part[name]
            else:
                raise UserError(f"it has no part at {pointer}; mend the $ref")
        return part

    def target(self, pointer: str, reference: str) -> str:
        """Find the part of the schema that a reference leads to; returns its JSON pointer.

        Args:
            pointer: JSON pointer to the part that contains the reference.
            reference: value of the part's $ref: a URI, a fragment, or both.

        Raises:
            ValueError: the reference leads out of the document, or to a part that does not exist.
        """
        base = self._base(pointer)
        uri, fragment = urldefrag(urljoin(base, reference))
        resource = self._resources.get(uri if reference.partition("#")[0] else base)
        if resource is None:
            raise UserError(f"$ref at {pointer} leads to {reference!r} outside of the schema; put that into its $defs")
        if not fragment or fragment.startswith("/"):
            steps = "".join(f"/{escaped(unescaped(unquote(step)))}" for step in fragment.split("/")[1:])
            found = resource + steps
            if not isinstance(self.at(found), Mapping | bool):
                raise UserError(f"$ref at {pointer} leads to {reference!r}, which is no schema; mend it")
            return found
        anchor = self._anchors.get((self._base(resource), unquote(fragment)))
        if anchor is None:
            raise UserError(f"$ref at {pointer} leads to {reference!r}, which there is not; mend it")
        return anchor

    def _base(self, pointer: str) -> str:
        while pointer not in self._bases:
            pointer = pointer.rpartition("/")[0]
        return self._bases[pointer]

    def _read(self, part: Any, pointer: str, base: str, levels: int = 0) -> None:
        if levels > MOST_LEVELS:
            raise UserError(f"it has schemas within more than {MOST_LEVELS} others; name parts of it in $defs")
        if not isinstance(part, Mapping):
            self._bases.setdefault(pointer, base)
            return
        if isinstance(identity := part.get("$id"), str):
            base = urldefrag(urljoin(base, identity))[0]
            if self._resources.setdefault(base, pointer) != pointer:
                raise UserError(f"$id at {pointer} is {identity!r}, as another one is; name each part by itself")
        self._bases[pointer] = base
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := part.get(name), str):
                self._anchors[base, anchor] = pointer
                if name == "$dynamicAnchor":
                    self.dynamic.setdefault(anchor, []).append(pointer)
        for step, inner in inner_schemas(part):
            self._read(inner, f"{pointer}/{step}", base, levels + 1)


def inner_schemas(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the schemas directly within another one, such as those under `items` or `properties`.

    Args:
        part: the outer schema.

    Yields:
        (path to the inner schema within the outer one, such as "properties/age"; the inner schema).
    """
    for name in ONE:
        if isinstance(inner := part.get(name), Mapping | bool):
            yield name, inner
    for name in (*LISTS, "items"):
        if isinstance(inner := part.get(name), list):
            for index, each in enumerate(inner):
                yield f"{name}/{index}", each
    for name in NAMED:
        if isinstance(inner := part.get(name), Mapping):
            for key, each in inner.items():
                if isinstance(each, Mapping | bool):
                    yield f"{name}/{escaped(key)}", each


def _check_parts(part: Any) -> None:
    """Refuse a schema that is nested too deep, or has half of a surrogate pair in a string."""
    parts = [part]
    for _ in range(MOST_JSON_LEVELS):
        for each in parts:
            strings = [each] if isinstance(each, str) else each if isinstance(each, Mapping) else ()
            if any("\ud800" <= character <= "\udfff" for string in strings for character in string):
                raise UserError("it has half of a surrogate pair (\\ud800 to \\udfff), which is no character; mend it")
        parts = [each for each in parts if isinstance(each, Mapping | list)]
        if not parts:
            return
        parts = [inner for each in parts for inner in (each.values() if isinstance(each, Mapping) else each)]
    raise UserError(f"it is nested more than {MOST_JSON_LEVELS} levels deep; name parts of it in $defs")


def escaped(name: str) -> str:
    """Escape a property's name for use in a JSON pointer: "a/b" becomes "a~1b"."""
    return name.replace("~", "~0").replace("/", "~1")


def unescaped(step: str) -> str:
    """Undo the escapes in one step of a JSON pointer: "a~1b" becomes "a/b"."""
    return step.replace("~1", "/").replace("~0", "~")


def _written(text: str) -> Written:
    """A number with decimals or an exponent; refused if large, as exact arithmetic would write 1e999999999 out."""
    exponent = text.lower().partition("e")[2].lstrip("+-").lstrip("0")
    if len(exponent) > 3 or int(exponent or 0) > MOST_DIGITS:
        raise UserError(f"{text[:40]} is beyond what a float can be")
    _check_digits(text)
    return Written(text)


def _integer(text: str) -> int:
    _check_digits(text)
    return int(text)


def _check_digits(text: str) -> None:
    if len(text) > MOST_DIGITS:
        raise UserError(f"a number has {len(text)} characters, of at most {MOST_DIGITS}")


def _no_constant(name: str) -> None:
    raise UserError(f"{name} is no number of JSON")
