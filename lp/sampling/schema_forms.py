"""The JSON values that a schema allows, as a union of forms, such as numbers in a range; forms can be intersected.

A demand is a set of places in the schema; a value must follow the schema at all of them. Demands on the items of a list
or on the properties of an object are expanded only when they are needed, so schemas may refer to themselves.
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
    """A part of a schema that a value must follow, or must not follow.

    Attributes:
        pointer: JSON pointer to the part, such as "#/properties/age".
        negated: whether the value must not follow the part.
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
    """A form (a set of JSON values of one type) with a single value: from `const` or `enum`, or null, true or false.

    Attributes:
        text: the value as text; two such forms are equal if their texts are, so 1 and 1.0 differ.
        value: the value itself, as Python data.
        as_given: whether a number may be written only as in the schema; otherwise 1 may also be written as 1.0.
    """

    text: str
    value: Any = field(compare=False)
    as_given: bool = False


@dataclass(frozen=True)
class Number:
    """A form (a set of JSON values of one type) with all numbers in a range.

    Attributes:
        integer: whether only integers are allowed.
        low: inclusive lower bound.
        above: exclusive lower bound.
        high: inclusive upper bound.
        below: exclusive upper bound.
        multiples: every number must be a multiple of each of these.
        places: JSON pointers to the parts of the schema that the form comes from, for messages.
    """

    integer: bool = False
    low: Fraction | None = None
    above: Fraction | None = None
    high: Fraction | None = None
    below: Fraction | None = None
    multiples: frozenset[Fraction] = frozenset()
    places: Places = field(default=(), compare=False)

    def joined(self, other: Number) -> Number | None:
        """Intersect this range with another one; None if no number is in both."""
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
    """A form (a set of JSON values of one type) with all strings of allowed lengths that match several expressions.

    Attributes:
        least, most: fewest and most characters; if `most` is None, there is no upper bound.
        languages: syntax trees of regular expressions, each of which must match the whole string.
        places: JSON pointers to the parts of the schema that the form comes from, for messages.
    """

    least: int = 0
    most: int | None = None
    languages: tuple[Node, ...] = ()
    places: Places = field(default=(), compare=False)

    def joined(self, other: Text) -> Text | None:
        """Intersect this form with another form of strings; None if no length is within the bounds of both."""
        least, most = max(self.least, other.least), _least(self.most, other.most)
        if most is not None and least > most:
            return None
        languages = tuple(dict.fromkeys(self.languages + other.languages))
        return Text(least, most, languages, _together(self.places, other.places))


@dataclass(frozen=True)
class Contained:
    """How many items of a list must follow a demand, from `contains`, `minContains` and `maxContains`.

    A demand is a set of places in the schema that a value must follow.

    Attributes:
        demand: the demand that these items must follow.
        others: the demand that all other items must follow.
        least, most: fewest and most items that follow `demand`; if `most` is None, there is no upper bound.
    """

    demand: Demand
    others: Demand
    least: int
    most: int | None


@dataclass(frozen=True)
class List:
    """A form (a set of JSON values of one type) with all lists whose items follow demands.

    A demand is a set of places in the schema that a value must follow.

    Attributes:
        first: a demand for each of the first items, from `prefixItems`.
        rest: the demand for every further item, from `items`.
        least, most: fewest and most items; if `most` is None, there is no upper bound.
        unique: JSON pointer to the part with `uniqueItems`; "" if equal items are allowed.
        contained: how many items must follow further demands, from `contains`.
        places: JSON pointers to the parts of the schema that the form comes from, for messages.
    """

    first: tuple[Demand, ...] = ()
    rest: Demand = ANYTHING
    least: int = 0
    most: int | None = None
    unique: str = ""
    contained: tuple[Contained, ...] = ()
    places: Places = field(default=(), compare=False)

    def item(self, index: int) -> Demand:
        """The demand on the item at an index (from 0): the set of places in the schema that the item must follow."""
        return self.first[index] if index < len(self.first) else self.rest

    def joined(self, other: List) -> List | None:
        """Intersect this form with another form of lists; None if no length is within the bounds of both."""
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
    """The demands that one part of a schema makes on an object's properties.

    A demand is a set of places in the schema that a property's value must follow.

    Attributes:
        named: (property's name, demand on its value), from `properties`.
        patterns: (pattern, demand on the values of all properties whose names it matches), from `patternProperties`.
        rest: demand on the values of all other properties, from `additionalProperties`.
    """

    named: tuple[tuple[str, Demand], ...] = ()
    patterns: tuple[tuple[str, Demand], ...] = ()
    rest: Demand = ANYTHING


@dataclass(frozen=True)
class Object:
    """A form (a set of JSON values of one type) with all objects whose properties follow demands.

    A demand is a set of places in the schema that a value must follow.

    Attributes:
        layers: demands on properties, from several parts of the schema; each property must follow all of them.
        required: names of properties that must be present.
        least, most: fewest and most properties; if `most` is None, there is no upper bound.
        names: demand on the name of every property, from `propertyNames`.
        places: JSON pointers to the parts of the schema that the form comes from, for messages.
    """

    layers: tuple[Layer, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: Demand = ANYTHING
    places: Places = field(default=(), compare=False)

    def joined(self, other: Object) -> Object | None:
        """Intersect this form with another form of objects; None if no number of properties is within both bounds."""
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
    """The union of forms (sets of JSON values) that has all values of the given types, such as ["string", "null"]."""
    return tuple(form for name in types for form in FORMS[name])


def type_of(form: Form) -> str:
    """JSON's name for the type of a form's values, such as "array" for a `List`."""
    if isinstance(form, Value):
        return type_of_value(form.value)
    return {Number: "number", Text: "string", List: "array", Object: "object"}[type(form)]


def type_of_value(value: Any) -> str:
    """JSON's name for the type of a value: "null", "boolean", "number", "string", "array" or "object"."""
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
    """Set the place in the schema, for messages, of those forms (sets of JSON values) in a union that have none yet.

    Args:
        union: the forms.
        pointer: JSON pointer to the part of the schema that the forms come from.

    Returns:
        The forms, with their places.
    """
    return tuple(form if isinstance(form, Value) or form.places else replace(form, places=(pointer,)) for form in union)


def _together(one: Places, other: Places) -> Places:
    return tuple(dict.fromkeys(one + other))[:MOST_PLACES]


def _largest(one: Fraction | None, other: Fraction | None) -> Fraction | None:
    given: Sequence[Fraction] = [each for each in (one, other) if each is not None]
    return max(given, default=None)


def _least(one: Any, other: Any) -> Any:
    return min((each for each in (one, other) if each is not None), default=None)
