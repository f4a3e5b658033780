"""What a JSON value may be, type by type: a union of forms, which can be intersected and, mostly, inverted.

A demand is a set of places of a schema, all of which a value follows. Those of a value's inside are looked at when they
are needed, so that schemas may refer to themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, TypeAlias

from lp.sampling.regex_syntax import Node

TYPES = ("null", "boolean", "number", "string", "array", "object")


@dataclass(frozen=True, order=True)
class Place:
    """A part of a schema that a value follows; or, negated, that it does not."""

    pointer: str
    negated: bool = False


Demand: TypeAlias = frozenset[Place]
Places: TypeAlias = tuple[str, ...]  # parts of a schema that a form comes from; not compared
MOST_PLACES = 8  # kept of a form, for messages
ANYTHING: Demand = frozenset()
NOTHING: Demand = frozenset({Place("nothing")})  # which no value follows


@dataclass(frozen=True)
class Value:
    """One value that is named: the null, a truth value, a number, string, list or object as it is written.

    Attributes:
        text: JSON of the value without spaces, by which values are compared.
        as_given: a number is written as the schema has it, and not as an equal one with or without decimals.
    """

    text: str
    value: Any = field(compare=False)
    as_given: bool = False


@dataclass(frozen=True)
class Number:
    """Numbers of a range.

    Attributes:
        low: every number is at least this.
        above: every number is more than this.
        high: every number is at most this.
        below: every number is less than this.
        multiples: every number is a multiple of each.
        places: parts of the schema that say so.
    """

    integer: bool = False
    low: Fraction | None = None
    above: Fraction | None = None
    high: Fraction | None = None
    below: Fraction | None = None
    multiples: frozenset[Fraction] = frozenset()
    places: Places = field(default=(), compare=False)

    def joined(self, other: Number) -> Number | None:
        """The numbers that are in both ranges; None if there are none."""
        made = Number(
            self.integer or other.integer,
            _largest(self.low, other.low),
            _largest(self.above, other.above),
            _least(self.high, other.high),
            _least(self.below, other.below),
            self.multiples | other.multiples,
            _together(self.places, other.places),
        )
        lowest = _largest(made.low, made.above)
        highest = _least(made.high, made.below)
        if lowest is None or highest is None:
            return made
        open_end = lowest in (made.above,) or highest in (made.below,)
        return None if lowest > highest or (lowest == highest and open_end) else made

    def has(self, value: Fraction) -> bool:
        """Whether a number is one of them."""
        return not (
            (self.integer and value.denominator != 1)
            or (self.low is not None and value < self.low)
            or (self.above is not None and value <= self.above)
            or (self.high is not None and value > self.high)
            or (self.below is not None and value >= self.below)
            or any((value / each).denominator != 1 for each in self.multiples)
        )


@dataclass(frozen=True)
class Text:
    """Strings by their length and by languages: a string is in all of them.

    Attributes:
        places: parts of the schema that say so.
    """

    least: int = 0
    most: int | None = None
    languages: tuple[Node, ...] = ()
    places: Places = field(default=(), compare=False)

    def joined(self, other: Text) -> Text | None:
        """The strings that are of both forms; None if their lengths exclude each other."""
        least, most = max(self.least, other.least), _least(self.most, other.most)
        if most is not None and least > most:
            return None
        languages = tuple(dict.fromkeys(self.languages + other.languages))
        return Text(least, most, languages, _together(self.places, other.places))


@dataclass(frozen=True)
class Contained:
    """So many items of a list follow a demand; the others follow another one."""

    demand: Demand
    others: Demand
    least: int
    most: int | None


@dataclass(frozen=True)
class List:
    """Lists that follow a schema.

    Attributes:
        first: what the first items follow.
        rest: what all others do.
        unique: where it is demanded that no item comes twice.
        places: parts of the schema that say something of such a list.
    """

    first: tuple[Demand, ...] = ()
    rest: Demand = ANYTHING
    least: int = 0
    most: int | None = None
    unique: str = ""
    contained: tuple[Contained, ...] = ()
    places: Places = field(default=(), compare=False)

    def item(self, index: int) -> Demand:
        """The demand that the item at this index follows."""
        return self.first[index] if index < len(self.first) else self.rest

    def joined(self, other: List) -> List | None:
        """The lists that are of both forms; None if their lengths exclude each other."""
        least, most = max(self.least, other.least), _least(self.most, other.most)
        if most is not None and least > most:
            return None
        count = max(len(self.first), len(other.first))
        first = tuple(self.item(index) | other.item(index) for index in range(count))
        contained = tuple(dict.fromkeys(self.contained + other.contained))
        places = _together(self.places, other.places)
        return List(first, self.rest | other.rest, least, most, self.unique or other.unique, contained, places)


@dataclass(frozen=True)
class Layer:
    """What one part of a schema says of the properties of an object.

    Attributes:
        named: what the property of a name follows.
        patterns: what every property follows whose name a pattern matches.
        rest: what all other properties follow.
    """

    named: tuple[tuple[str, Demand], ...] = ()
    patterns: tuple[tuple[str, Demand], ...] = ()
    rest: Demand = ANYTHING


@dataclass(frozen=True)
class Object:
    """Objects that follow a schema.

    Attributes:
        layers: what is said of properties, which follow every layer.
        required: names that are there.
        names: what all names follow.
        places: parts of the schema that say something of such an object.
    """

    layers: tuple[Layer, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: Demand = ANYTHING
    places: Places = field(default=(), compare=False)

    def joined(self, other: Object) -> Object | None:
        """The objects that are of both forms; None if their numbers of properties exclude each other."""
        least, most = max(self.least, other.least), _least(self.most, other.most)
        required = tuple(dict.fromkeys(self.required + other.required))
        if most is not None and max(least, len(required)) > most:
            return None
        layers = tuple(dict.fromkeys(self.layers + other.layers))
        places = _together(self.places, other.places)
        return Object(layers, required, least, most, self.names | other.names, places)


Form: TypeAlias = Value | Number | Text | List | Object
Union: TypeAlias = tuple[Form, ...]
NULL = Value("null", None)
TRUE, FALSE = Value("true", True), Value("false", False)
FORMS: dict[str, Union] = {
    "null": (NULL,),
    "boolean": (TRUE, FALSE),
    "number": (Number(),),
    "string": (Text(),),
    "array": (List(),),
    "object": (Object(),),
}


def all_forms(types: Iterable[str] = TYPES) -> Union:
    """The union of every value of these types."""
    return tuple(form for name in types for form in FORMS[name])


def type_of(form: Form) -> str:
    """JSON's name of the type that a form's values have."""
    if isinstance(form, Value):
        return type_of_value(form.value)
    return {Number: "number", Text: "string", List: "array", Object: "object"}[type(form)]


def type_of_value(value: Any) -> str:
    """JSON's name of the type that a value has."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case dict():
            return "object"
    return "number"


def placed(union: Union, pointer: str) -> Union:
    """The forms of a union, with this part of the schema as the place of those that name none."""
    return tuple(form if isinstance(form, Value) or form.places else replace(form, places=(pointer,)) for form in union)


def _together(one: Places, other: Places) -> Places:
    return tuple(dict.fromkeys(one + other))[:MOST_PLACES]


def _largest(one: Fraction | None, other: Fraction | None) -> Fraction | None:
    given: Sequence[Fraction] = [each for each in (one, other) if each is not None]
    return max(given, default=None)


def _least(one: Any, other: Any) -> Any:
    return min((each for each in (one, other) if each is not None), default=None)
