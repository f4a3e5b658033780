"""The JSON values that a schema allows as a union of forms, one or more for each type; forms can be intersected.

A demand is a set of places in the schema: a value must follow the schema at each of them. Demands on the inside of a
value are looked at only when they are needed, so that schemas may refer to themselves.
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
    """A part of a schema that a value must follow.

    Attributes:
        pointer: JSON pointer of the part, such as "#/properties/age".
        negated: the value must not follow it.
    """

    pointer: str
    negated: bool = False


Demand: TypeAlias = frozenset[Place]
Places: TypeAlias = tuple[str, ...]  # parts of a schema that a form comes from; not compared
MOST_PLACES = 8  # kept of a form, for messages
ANYTHING: Demand = frozenset()
NOTHING: Demand = frozenset({Place("nothing")})  # which no value follows


@dataclass(frozen=True)
class Value:
    """The form of one given value, as `const`, `enum`, null and booleans have it.

    Attributes:
        text: tells values apart as they are written; forms are compared by it.
        value: the value itself, as Python data.
        as_given: write a number only as the schema has it; else 1 may be written as 1.0.
    """

    text: str
    value: Any = field(compare=False)
    as_given: bool = False


@dataclass(frozen=True)
class Number:
    """The form of the numbers in a range.

    Attributes:
        integer: only integers.
        low: every number is at least this.
        above: every number is more than this.
        high: every number is at most this.
        below: every number is less than this.
        multiples: every number is a multiple of each of these.
        places: parts of the schema that say so, for messages.
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
        """Whether a number is in the range."""
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
    """The form of strings of some length that all of some expressions match.

    Attributes:
        least, most: bounds of their length in characters; None: there is none.
        languages: expressions, each of which matches the whole string.
        places: parts of the schema that say so, for messages.
    """

    least: int = 0
    most: int | None = None
    languages: tuple[Node, ...] = ()
    places: Places = field(default=(), compare=False)

    def joined(self, other: Text) -> Text | None:
        """The strings that are of both forms; None if the bounds of their lengths exclude each other."""
        least, most = max(self.least, other.least), _least(self.most, other.most)
        if most is not None and least > most:
            return None
        languages = tuple(dict.fromkeys(self.languages + other.languages))
        return Text(least, most, languages, _together(self.places, other.places))


@dataclass(frozen=True)
class Contained:
    """How many items of a list follow a demand, as `contains` with `minContains` and `maxContains` says.

    Attributes:
        demand: what these items follow.
        others: what all other items follow.
        least, most: bounds of their number; None: there is none.
    """

    demand: Demand
    others: Demand
    least: int
    most: int | None


@dataclass(frozen=True)
class List:
    """The form of lists whose items follow demands.

    Attributes:
        first: the demand on each of the first items (`prefixItems`).
        rest: the demand on every other item (`items`).
        least, most: bounds of the number of items; None: there is none.
        unique: JSON pointer of the part with `uniqueItems`; "" if items may come twice.
        contained: what `contains` says.
        places: parts of the schema that say something of such a list, for messages.
    """

    first: tuple[Demand, ...] = ()
    rest: Demand = ANYTHING
    least: int = 0
    most: int | None = None
    unique: str = ""
    contained: tuple[Contained, ...] = ()
    places: Places = field(default=(), compare=False)

    def item(self, index: int) -> Demand:
        """The demand on the item at an index: the places in the schema that it must follow."""
        return self.first[index] if index < len(self.first) else self.rest

    def joined(self, other: List) -> List | None:
        """The lists that are of both forms; None if the bounds of their lengths exclude each other."""
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
    """What one part of a schema says of an object's properties.

    Attributes:
        named: (name, demand on its value), as in `properties`.
        patterns: (pattern, demand on the value of every property whose name it matches), as in `patternProperties`.
        rest: demand on the values of all other properties (`additionalProperties`).
    """

    named: tuple[tuple[str, Demand], ...] = ()
    patterns: tuple[tuple[str, Demand], ...] = ()
    rest: Demand = ANYTHING


@dataclass(frozen=True)
class Object:
    """The form of objects whose properties follow demands.

    Attributes:
        layers: what parts of the schema say of properties; each property follows all of them.
        required: names of properties that must be there.
        least, most: bounds of the number of properties; None: there is none.
        names: demand on every name (`propertyNames`).
        places: parts of the schema that say something of such an object, for messages.
    """

    layers: tuple[Layer, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: Demand = ANYTHING
    places: Places = field(default=(), compare=False)

    def joined(self, other: Object) -> Object | None:
        """The objects that are of both forms; None if the bounds of their numbers of properties exclude each other."""
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
    """The union of all JSON values of these types, such as ["string", "null"]."""
    return tuple(form for name in types for form in FORMS[name])


def type_of(form: Form) -> str:
    """JSON's name of the type of a form's values: "array" for `List`."""
    if isinstance(form, Value):
        return type_of_value(form.value)
    return {Number: "number", Text: "string", List: "array", Object: "object"}[type(form)]


def type_of_value(value: Any) -> str:
    """JSON's name of a value's type: "null", "boolean", "number", "string", "array" or "object"."""
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
    """The forms of a union, with a part of the schema noted as the place of each form that has none, for messages.

    Args:
        union: the forms.
        pointer: JSON pointer of the part.
    """
    return tuple(form if isinstance(form, Value) or form.places else replace(form, places=(pointer,)) for form in union)


def _together(one: Places, other: Places) -> Places:
    return tuple(dict.fromkeys(one + other))[:MOST_PLACES]


def _largest(one: Fraction | None, other: Fraction | None) -> Fraction | None:
    given: Sequence[Fraction] = [each for each in (one, other) if each is not None]
    return max(given, default=None)


def _least(one: Any, other: Any) -> Any:
    return min((each for each in (one, other) if each is not None), default=None)
