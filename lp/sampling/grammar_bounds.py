"""Whether what a grammar forces is bounded: a text that must follow, without any choice, must not be without end.

A rule that needs itself forces one, and so do counts within counts, of which a few characters are enough.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lp.errors import UserError

MOST_REPEATS = 1000  # of counts within counts, as 20 lists of 50 items
COUNTS = ("minItems", "minLength", "minProperties")  # of JSON schemas
# What has no rules, groups or counts: strings and classes of EBNF, escapes and classes of regular expressions. A class
# that is not closed goes to the end: else each "[" would be one that is looked for up to there.
CLASSES = re.compile(r"\[(?:\\(?s:.)|[^\]\\])*+(?:\]|\\?\Z)|\\.")
LITERALS = re.compile(rf'"(?:\\.|[^"\\\n])*"|{CLASSES.pattern}|#[^\n]*')
RULE = re.compile(r"([\w.-]+)\s*::=")
NAME = re.compile(r"[\w.-]+")
COUNTED = re.compile(r"\((?:\?[:=!])?|\)|\{(\d+)(?:,(\d*))?\}|[*+?]")
LOOP = 10  # a loop within counts is as hard to follow as so many more of them


def schema_is_bounded(text: str) -> bool:
    """Of a JSON schema, as JSON."""
    try:
        schema = json.loads(text)
        return _schema_repeats(schema, schema, {}) <= MOST_REPEATS
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # the compiler says what is wrong with it
        return False


def regex_is_bounded(pattern: str) -> bool:
    """Of a regular expression."""
    return _repeats(CLASSES.sub("a", pattern)) <= MOST_REPEATS


def ebnf_is_bounded(rules: str) -> bool:
    """Of rules in EBNF: none needs itself, however it goes on; those of most languages do."""
    bodies = _bodies(rules)
    if any(name in needed for name, needed in _needed(bodies).items()):
        return False
    try:
        return _chained_repeats(bodies) <= MOST_REPEATS
    except RecursionError:  # of a thousand rules, each of which needs the next one
        return False


def check_ebnf(rules: str) -> None:
    """Refuse rules that end the process: xgrammar 0.2 does not return from a rule that is a count of itself.

    Raises:
        ValueError: the rule.
    """
    bodies = _bodies(rules)
    for name, needed in _needed(bodies).items():
        if name in needed and "{" in bodies[name]:
            raise UserError(f"the rule {name!r} needs itself, and has a count ({{}}); write the count out")


def _bodies(rules: str) -> dict[str, str]:
    """Of every rule, what it says, without literals."""
    parts = RULE.split(LITERALS.sub(" ", rules))[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _needed(bodies: Mapping[str, str]) -> dict[str, set[str]]:
    """Of every rule, those that it needs, directly or by others."""
    needed = {name: {each for each in NAME.findall(body) if each in bodies} for name, body in bodies.items()}
    for middle in bodies:  # Warshall's algorithm
        for of in needed.values():
            if middle in of:
                of |= needed[middle]
    return needed


def is_followed_quickly(kind: str, text: str) -> bool:
    """Whether a regular expression, rules or a schema's patterns have few counts and loops within counts.

    Args:
        kind: "regex", "ebnf" or "json_schema".
        text: of that; JSON of a schema.
    """
    if kind == "json_schema":
        return all(_repeats(CLASSES.sub("a", pattern), LOOP) <= MOST_REPEATS for pattern in _patterns(json.loads(text)))
    if kind == "regex":
        return _repeats(CLASSES.sub("a", text), LOOP) <= MOST_REPEATS
    bodies = _bodies(text)
    return max([_chained_repeats(bodies), *(_repeats(body, LOOP) for body in bodies.values())]) <= MOST_REPEATS


def _chained_repeats(bodies: Mapping[str, str]) -> float:
    """The largest product of counts of rules that need each other, one after another, without those that come again."""
    needed = {name: {each for each in NAME.findall(body) if each in bodies} for name, body in bodies.items()}
    known: dict[str, float] = {}

    def of(name: str) -> float:
        if name not in known:
            known[name] = 1.0  # while it is looked at
            known[name] = _repeats(bodies[name]) * max(map(of, needed[name]), default=1.0)
        return known[name]

    return max(map(of, bodies), default=1.0)


def _patterns(part: Any) -> Iterator[str]:
    """The regular expressions of a schema."""
    if isinstance(part, Mapping):
        if isinstance(pattern := part.get("pattern"), str):
            yield pattern
        yield from _names(part.get("patternProperties"))
    if isinstance(part, Mapping | list):
        for inner in part.values() if isinstance(part, Mapping) else part:
            yield from _patterns(inner)


def _repeats(expression: str, loop: int = 1) -> float:
    """The largest product of counts that lie within each other, in an expression without literals.

    Args:
        loop: what *, + and ? count as.
    """
    inner = [1.0]  # by open group, the largest product within it
    closed = 1.0  # that of the group that has just ended
    end = 0
    for found in COUNTED.finditer(expression):
        if found[0].startswith("("):
            inner.append(1.0)
        elif found[0] == ")":
            closed = inner.pop() if len(inner) > 1 else 1.0
            inner[-1] = max(inner[-1], closed)
            end = found.end()
        else:
            of = closed if found.start() == end else 1.0
            closed = of * (max(int(found[1][:9]), int((found[2] or "1")[:9]), 1) if found[1] else loop)
            inner[-1] = max(inner[-1], closed)
            end = found.end()
    return max(inner)


def _schema_repeats(part: Any, schema: Any, known: dict[str, float]) -> float:
    """The same of a part of a schema; infinite where it needs itself.

    Args:
        part: of `schema`.
        schema: where references lead.
        known: by reference; infinite while it is looked at.
    """
    if isinstance(part, list):
        return max((_schema_repeats(each, schema, known) for each in part), default=1.0)
    if not isinstance(part, Mapping):
        return 1.0
    own = max([1.0, *(float(part[name]) for name in COUNTS if name in part)])
    for pattern in (part.get("pattern", ""), *_names(part.get("patternProperties"))):
        own = max(own, _repeats(CLASSES.sub("a", pattern)))
    inner = max((_schema_repeats(each, schema, known) for each in part.values()), default=1.0)
    reference = part.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = math.inf
            known[reference] = _schema_repeats(_target(schema, reference), schema, known)
        inner = max(inner, known[reference])
    return own * inner


def _names(properties: Any) -> list[str]:
    return [*properties] if isinstance(properties, Mapping) else []


def _target(schema: Any, reference: str) -> Any:
    """What a reference within a schema leads to.

    Raises:
        KeyError: nothing.
    """
    path = reference.removeprefix("#").strip("/")
    for name in path.split("/") if path else []:
        schema = schema[name.replace("~1", "/").replace("~0", "~")]
    return schema
