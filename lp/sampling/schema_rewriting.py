"""Rewrites a JSON schema (draft 2020-12) as a union of forms, such as numbers in a range; every keyword exactly.

A keyword such as `minimum` limits the values of one type and allows all values of other types. So each schema starts as
a union over all types. Keywords side by side, `allOf` and `$ref` become intersections; `anyOf` becomes a union;
`oneOf`, `not` and `if` need complements, which most forms have. A keyword without an exact form is refused, with its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from lp.errors import UserError
from lp.sampling.language_checks import Language
from lp.sampling.regex_syntax import ANY, Alt, And, Node, Not, Repeat, found, literal
from lp.sampling.schema_document import Document, UnplacedError, Written, escaped
from lp.sampling.schema_formats import ENFORCED, REFUSED, format_language
from lp.sampling.schema_forms import (
    ANYTHING,
    FALSE,
    FORMS,
    NOTHING,
    NULL,
    TRUE,
    TYPES,
    Contained,
    Demand,
    Form,
    Layer,
    List,
    Number,
    Object,
    Place,
    Text,
    Union,
    Value,
    all_forms,
    placed,
    type_of,
    type_of_value,
)

MOST_FORMS = 512  # of one union
MOST_WORK = 200_000  # intersections of two forms, and looks at a value
EMPTY_WORK = 200  # of looking whether strings are without a text, in such steps
MOST_COUNT = 1 << 20  # of items, characters, properties


class _LoopError(UserError):
    """Raised where a schema's own meaning depends on itself, without a property or an item between."""


class Rewriting:
    """Rewrites one JSON schema as unions of forms, such as numbers in a range, from which a grammar is made.

    A demand is a set of places in the schema; a value must follow the schema at all of them.

    Args:
        document: the schema.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self._unions: dict[Demand, Union] = {}
        self._places: dict[str, Union] = {}
        self._open: set[str] = set()  # places that are looked at
        self._never_open: set[Demand] = set()
        self._languages: dict[Node, Language] = {}
        self._never_texts: dict[Text, bool] = {}
        self._work = 0

    # --- demands

    def demand(self, pointer: str) -> Demand:
        """The demand that a value follows the schema at one JSON pointer; demands are sets of places in the schema.

        It is ANYTHING if the schema there is true or empty, and NOTHING if it is false.
        """
        part = self.document.at(pointer)
        if part is True or part == {}:
            return ANYTHING
        if part is False:
            return NOTHING
        return frozenset({Place(pointer)})

    def inverses(self, demand: Demand) -> list[Demand]:
        """Negate a demand: a value breaks the demand exactly if it follows at least one of the returned demands.

        Args:
            demand: places in the schema, all of which a value must follow.
        """
        if demand == NOTHING:
            return [ANYTHING]
        return [frozenset({Place(place.pointer, not place.negated)}) for place in sorted(demand)]

    def union(self, demand: Demand) -> Union:
        """The values that follow a demand (a set of places in the schema), as a union of forms, such as number ranges.

        Raises:
            ValueError: a keyword has no exact form; the message names its place.
        """
        if demand not in self._unions:
            union = all_forms()
            for place in sorted(demand):
                if place in NOTHING:
                    union = ()
                else:
                    own = self._at(place.pointer)
                    try:
                        union = self.both(union, self.complement(own, place.pointer) if place.negated else own)
                    except UnplacedError as error:
                        raise error.at(place.pointer) from None
            self._unions[demand] = union
        return self._unions[demand]

    def has(self, demand: Demand, value: Any) -> bool:
        """Whether a JSON value, given as Python data, follows the schema at every place in a demand."""
        return any(self.form_has(form, value) for form in self.union(demand))

    def form_has(self, form: Form, value: Any) -> bool:
        """Whether a form, such as numbers in a range, contains a JSON value, given as Python data."""
        if type_of(form) != type_of_value(value):
            return False
        self._count_work()
        match form:
            case Value():
                return same(form.value, value)
            case Number():
                return form.has(Fraction(value))
            case Text(least, most, languages):
                fits = least <= len(value) and (most is None or len(value) <= most)
                return fits and all(self.language(each).has(value) for each in languages)
            case List():
                fits = form.least <= len(value) and (form.most is None or len(value) <= form.most)
                items = all(self.has(form.item(index), each) for index, each in enumerate(value))
                return fits and items and self._contains(form, value) and not (form.unique and _twice(value))
            case Object():
                fits = form.least <= len(value) and (form.most is None or len(value) <= form.most)
                named = {*form.required} <= {*value} and all(self.has(form.names, name) for name in value)
                return fits and named and all(self.has(self.property(form, name), value[name]) for name in value)
        raise AssertionError(form)

    def _contains(self, form: List, items: Sequence[Any]) -> bool:
        for each in form.contained:
            count = sum(self.has(each.demand, item) for item in items)
            if count < each.least or (each.most is not None and count > each.most):
                return False
        return True

    def language(self, node: Node) -> Language:
        """Get the Language that checks which strings an expression matches; it is made once for each expression."""
        if node not in self._languages:
            self._languages[node] = Language(node)
        return self._languages[node]

    def property(self, form: Object, name: str) -> Demand:
        """The demand on the value of an object's property: the set of places in the schema that it must follow.

        Args:
            form: the form of the object.
            name: the property's name.
        """
        demand: Demand = ANYTHING
        for layer in form.layers:
            own = [inner for other, inner in layer.named if other == name]
            own += [inner for pattern, inner in layer.patterns if self.language(found(pattern)).has(name)]
            demand = demand.union(*own) if own else demand | layer.rest
        return NOTHING if demand >= NOTHING else demand

    # --- unions

    def both(self, one: Union, other: Union) -> Union:
        """Intersect two unions of forms (sets of JSON values): the result has the values that are in both unions.

        Raises:
            ValueError: the intersection has too many forms.
        """
        if one == all_forms():
            return other
        if other == all_forms():
            return one
        made: dict[Form, None] = {}
        by_type: dict[str, list[Form]] = {}
        for form in other:
            by_type.setdefault(type_of(form), []).append(form)
        kinds = 0  # of forms that are not one value
        for first in one:
            for second in by_type.get(type_of(first), ()):
                self._count_work()
                joined = self._joined(first, second)
                if joined is None or joined in made or self.is_never(joined):
                    continue
                made[joined] = None
                kinds += not isinstance(joined, Value)
                if kinds > MOST_FORMS:
                    raise UnplacedError("a value", f"has more than {MOST_FORMS} alternatives; write it with fewer")
        return tuple(made)

    def _count_work(self, steps: int = 1) -> None:
        self._work += steps
        if self._work > MOST_WORK:
            raise UserError("it has too many alternatives that meet; write it with fewer")

    def _joined(self, first: Form, second: Form) -> Form | None:
        if isinstance(first, Value):
            return _named_once(first, second) if self.form_has(second, first.value) else None
        if isinstance(second, Value):
            return _named_once(second, first) if self.form_has(first, second.value) else None
        return first.joined(second)  # type: ignore[arg-type]

    def is_never(self, form: Form) -> bool:
        """Whether a form (a set of JSON values) is known to be empty, so that it can be left out; False if in doubt."""
        match form:
            case Text(least, most, languages) if len(languages) + (least > 0 or most is not None) > 1:
                if form not in self._never_texts:
                    self._count_work(EMPTY_WORK)
                    self._never_texts[form] = self.language(text_language(form)).is_empty()
                return self._never_texts[form]
            case List():
                return any(
                    self._demands_nothing(form.item(index)) for index in range(min(form.least, len(form.first) + 1))
                )
            case Object():
                return any(self._demands_nothing(self.property(form, name)) for name in form.required)
        return False

    def _demands_nothing(self, demand: Demand) -> bool:
        if demand in self._never_open or any(place.pointer in self._open for place in demand):
            return False  # a schema within itself; the grammar finds those without an end
        self._never_open.add(demand)
        try:
            return not self.union(demand)
        except _LoopError:
            return False
        finally:
            self._never_open.remove(demand)

    def complement(self, union: Union, pointer: str) -> Union:
        """Complement a union of forms (sets of JSON values): the result has all JSON values that are not in the union.

        Args:
            union: the forms.
            pointer: JSON pointer to the part of the schema that the forms come from, for messages.

        Raises:
            ValueError: a form has no exact complement.
        """
        made: list[Form] = []
        for name in TYPES:
            own = [form for form in union if type_of(form) == name]
            others: Union = FORMS[name]
            if name == "string":  # those that are named at once: each by itself is looked at behind all before it
                named = tuple(literal(form.value) for form in own if isinstance(form, Value))
                own = [form for form in own if not isinstance(form, Value)]
                others = (Text(languages=(Not(named[0] if len(named) == 1 else Alt(named)),)),) if named else others
            for form in own:
                others = self.both(others, self._other(form, pointer))
            made += others
        return placed(tuple(made), pointer)

    def _other(self, form: Form, pointer: str) -> Union:
        """The values of a form's own type that are not of the form."""
        match form:
            case Value(_, value):
                return _other_values(value, pointer)
            case Number():
                return _other_numbers(form, pointer)
            case Text(least, most, languages):
                made: list[Form] = [Text(most=least - 1)] if least else []
                made += [Text(least=most + 1)] if most is not None else []
                return (*made, *(Text(languages=(Not(each),)) for each in languages))
            case List():
                return self._other_lists(form, pointer)
            case Object():
                return self._other_objects(form, pointer)
        raise AssertionError(form)

    def _other_lists(self, form: List, pointer: str) -> Union:
        if form.unique:
            raise _inexact("uniqueItems", pointer)
        made: list[Form] = [List(most=form.least - 1)] if form.least else []
        made += [List(least=form.most + 1)] if form.most is not None else []
        for index, demand in enumerate(form.first):
            made += [List((ANYTHING,) * index + (each,), least=index + 1) for each in self.inverses(demand)]
        if form.rest != ANYTHING:
            if form.rest == NOTHING:
                made.append(List(least=len(form.first) + 1))
            elif form.first:
                raise _inexact("items behind prefixItems", pointer)
            else:
                made += [List(contained=(Contained(each, ANYTHING, 1, None),)) for each in self.inverses(form.rest)]
        for contained in form.contained:
            if (contained.least, contained.most) != (1, None) or len(others := self.inverses(contained.demand)) != 1:
                raise _inexact("contains with a count", pointer)
            made.append(List(rest=others[0]))
        return tuple(made)

    def _other_objects(self, form: Object, pointer: str) -> Union:
        if form.names != ANYTHING:
            raise _inexact("propertyNames", pointer)
        made: list[Form] = [Object(most=form.least - 1)] if form.least else []
        made += [Object(least=form.most + 1)] if form.most is not None else []
        made += [Object((Layer(((name, NOTHING),)),)) for name in form.required]
        for layer in form.layers:
            if layer.patterns and any(inner != ANYTHING for _, inner in layer.patterns):
                raise _inexact("patternProperties", pointer)
            if layer.rest != ANYTHING:
                raise _inexact("additionalProperties", pointer)
            for name, inner in layer.named:
                if inner != ANYTHING:
                    made += [Object((Layer(((name, each),)),), (name,)) for each in self.inverses(inner)]
        return tuple(form for form in made if not self.is_never(form))

    # --- places

    def _at(self, pointer: str) -> Union:
        if pointer not in self._places:
            if pointer in self._open:
                raise _LoopError(f"$ref at {pointer} leads to itself, without a property or an item between; mend it")
            self._open.add(pointer)
            try:
                self._places[pointer] = self._read(pointer)
            except UnplacedError as error:
                raise error.at(pointer) from None
            finally:
                self._open.remove(pointer)
        return self._places[pointer]

    def _read(self, pointer: str) -> Union:
        part = self.document.at(pointer)
        if isinstance(part, bool):
            return all_forms() if part else ()
        if not isinstance(part, Mapping):
            raise UserError(f"the schema at {pointer} is {part!r}; give an object, true or false")
        union = placed(_typed(self, pointer, part), pointer)
        for keyword in part:
            if keyword in RULES:
                union = self.both(union, placed(RULES[keyword](self, pointer, part), pointer))
        return union

    def where(self, form: Form, keyword: str) -> Sequence[str]:
        """JSON pointers that a message about a keyword names: the form's places that have the keyword, or else all.

        Args:
            form: the form, whose `places` are the parts of the schema that it comes from.
            keyword: the keyword that the message is about.
        """
        places = () if isinstance(form, Value) else form.places
        return [each for each in places if keyword in self.document.at(each)] or places

    def schemas(self, pointer: str, keyword: str) -> list[str]:
        """JSON pointers to the schemas in a keyword's list, such as "#/allOf/0" for the first schema in `allOf`.

        Args:
            pointer: JSON pointer to the part that has the keyword.
            keyword: a keyword whose value is a list of schemas, such as "allOf".

        Raises:
            ValueError: the keyword's value is no list.
        """
        given = self.document.at(f"{pointer}/{keyword}")
        if not isinstance(given, list):
            raise _bad(keyword, pointer, given, "a list of schemas")
        return [f"{pointer}/{keyword}/{index}" for index in range(len(given))]

    def at(self, pointer: str) -> Union:
        """The values that the schema at a JSON pointer allows, as a union of forms, such as number ranges."""
        return self.union(frozenset({Place(pointer)}))


def text_language(form: Text) -> Node:
    """Make the regular expression, as a syntax tree, that matches exactly the strings of a form.

    Args:
        form: a set of strings, given by bounds on their length and by expressions that they must match.
    """
    return And((Repeat(ANY, form.least, form.most), *form.languages))


# --- the keywords of one type


def _typed(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """`type`, and all keywords that say something of one type."""
    given = part.get("type", [*TYPES])
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) and name in (*TYPES, "integer") for name in names):
        raise _bad("type", pointer, given, f"one or more of {', '.join((*TYPES, 'integer'))}")
    made: list[Form] = []
    for name in dict.fromkeys(names):
        match name:
            case "null":
                made.append(NULL)
            case "boolean":
                made += [TRUE, FALSE]
            case "number":
                made += _numbers(pointer, part, integer=False)
            case "integer" if "number" not in names:
                made += _numbers(pointer, part, integer=True)
            case "string":
                made += _texts(pointer, part)
            case "array":
                made += _lists(rewriting, pointer, part)
            case "object":
                made += _objects(rewriting, pointer, part)
    return tuple(form for form in made if not rewriting.is_never(form))


def _numbers(pointer: str, part: Mapping[str, Any], integer: bool) -> Union:
    bounds: dict[str, Fraction | None] = {}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        given = part.get(keyword)
        if isinstance(given, bool) and keyword.startswith("exclusive"):  # of draft 4: the other bound is left out
            bounds[keyword] = Fraction(part[keyword[9:].lower()]) if given and keyword[9:].lower() in part else None
        else:
            bounds[keyword] = _number(keyword, pointer, given)
    multiple = _number("multipleOf", pointer, part.get("multipleOf"))
    if multiple is not None and multiple <= 0:
        raise _bad("multipleOf", pointer, part["multipleOf"], "more than 0")
    form = Number(
        integer,
        bounds["minimum"],
        bounds["exclusiveMinimum"],
        bounds["maximum"],
        bounds["exclusiveMaximum"],
        frozenset({multiple} if multiple is not None else ()),
    )
    joined = form.joined(form)
    return (joined,) if joined else ()


def _texts(pointer: str, part: Mapping[str, Any]) -> Union:
    languages: list[Node] = []
    if "pattern" in part:
        languages.append(_pattern("pattern", pointer, part["pattern"]))
    form = part.get("format")
    if form is not None and not isinstance(form, str):
        raise _bad("format", pointer, form, "a string")
    if form in ENFORCED:
        languages.append(format_language(form))
    elif form in REFUSED:
        raise UserError(
            f"format at {pointer} is {form!r}, which is not enforced (those are {', '.join(ENFORCED)}); leave it out"
        )
    joined = Text().joined(
        Text(_count("minLength", pointer, part) or 0, _count("maxLength", pointer, part), tuple(languages))
    )
    return (joined,) if joined else ()


def _lists(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    first: tuple[Demand, ...] = ()
    rest_keyword = "items"
    for keyword in ("prefixItems", "items"):  # a list of `items` is what older drafts have for prefixItems
        if keyword in part and (keyword == "prefixItems" or isinstance(part[keyword], list)):
            first = tuple(map(rewriting.demand, rewriting.schemas(pointer, keyword)))
            rest_keyword = "items" if keyword == "prefixItems" else "additionalItems"
    rest = rewriting.demand(f"{pointer}/{rest_keyword}") if rest_keyword in part else ANYTHING
    unique = part.get("uniqueItems")
    if not isinstance(unique, bool | None):
        raise _bad("uniqueItems", pointer, unique, "true or false")
    form = List(
        first,
        rest,
        _count("minItems", pointer, part) or 0,
        _count("maxItems", pointer, part),
        pointer if unique else "",
    )
    if "contains" in part:
        demand = rewriting.demand(f"{pointer}/contains")
        least = _count("minContains", pointer, part)
        least, most = 1 if least is None else least, _count("maxContains", pointer, part)
        if most is not None and most < least:
            return ()
        if least or most is not None:
            others = rewriting.inverses(demand) if most is not None else [ANYTHING]
            others = others or [NOTHING]
            if len(others) > 1:
                raise _inexact("maxContains", pointer)
            form = replace(form, contained=(Contained(demand, others[0], least, most),))
    joined = List().joined(form)
    return (joined,) if joined else ()


def _objects(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    named = tuple(
        (name, rewriting.demand(f"{pointer}/properties/{escaped(name)}"))
        for name in _mapping(part, "properties", pointer)
    )
    patterns = tuple(
        (pattern, rewriting.demand(f"{pointer}/patternProperties/{escaped(pattern)}"))
        for pattern in _mapping(part, "patternProperties", pointer)
    )
    for pattern, _ in patterns:
        _pattern("patternProperties", pointer, pattern)
    rest = rewriting.demand(f"{pointer}/additionalProperties") if "additionalProperties" in part else ANYTHING
    names = rewriting.demand(f"{pointer}/propertyNames") if "propertyNames" in part else ANYTHING
    layer = Layer(named, patterns, rest)
    form = Object(
        (layer,) if layer != Layer() else (),
        tuple(dict.fromkeys(_required("required", pointer, part.get("required", [])))),
        _count("minProperties", pointer, part) or 0,
        _count("maxProperties", pointer, part),
        names,
    )
    joined = Object().joined(form)
    return (joined,) if joined else ()


# --- the keywords of all types


def _constant(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """What `const` allows."""
    return (value_form(part["const"]),)


def _enumeration(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """What `enum` allows."""
    if not isinstance(part["enum"], list):
        raise _bad("enum", pointer, part["enum"], "a list")
    return tuple(dict.fromkeys(map(value_form, part["enum"])))


def _reference(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """`$ref`: that schema, beside its siblings."""
    return rewriting.at(rewriting.document.target(pointer, _string("$ref", pointer, part["$ref"])))


def _dynamic_reference(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """`$dynamicRef`: a $ref, unless several parts have the anchor's name; which one it is depends on the way to it."""
    reference = _string("$dynamicRef", pointer, part["$dynamicRef"])
    target = rewriting.document.target(pointer, reference)
    if len(rewriting.document.dynamic.get(reference.rpartition("#")[2], [])) > 1:
        raise UserError(f"$dynamicRef at {pointer} leads to {reference!r}, which several parts are called; take $ref")
    return rewriting.at(target)


def _all_of(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """`allOf`: the intersection."""
    union = all_forms()
    for place in rewriting.schemas(pointer, "allOf"):
        union = rewriting.both(union, rewriting.at(place))
    return union


def _any_of(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """`anyOf`: the union."""
    return tuple(dict.fromkeys(form for place in rewriting.schemas(pointer, "anyOf") for form in rewriting.at(place)))


def _one_of(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """`oneOf`: the values of each alternative that no other one has; those that share no values stay as they are."""
    unions = [rewriting.at(place) for place in rewriting.schemas(pointer, "oneOf")]
    made: list[Form] = []
    for index, union in enumerate(unions):
        for other_index, other in enumerate(unions):
            if index != other_index and rewriting.both(union, other):
                union = rewriting.both(union, rewriting.complement(other, f"{pointer}/oneOf/{other_index}"))
        made += union
    return tuple(dict.fromkeys(made))


def _not(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """`not`: the complement."""
    return rewriting.complement(rewriting.at(f"{pointer}/not"), f"{pointer}/not")


def _if(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """`if`: the values that follow it and `then`, and those that break it and follow `else`."""
    if "then" not in part and "else" not in part:
        return all_forms()
    condition = rewriting.at(f"{pointer}/if")
    otherwise = rewriting.complement(condition, f"{pointer}/if")
    if "then" in part:
        condition = rewriting.both(condition, rewriting.at(f"{pointer}/then"))
    if "else" in part:
        otherwise = rewriting.both(otherwise, rewriting.at(f"{pointer}/else"))
    return tuple(dict.fromkeys((*condition, *otherwise)))


def _dependent(rewriting: Rewriting, pointer: str, part: Mapping[str, Any], keyword: str) -> Union:
    """`dependentRequired`, `dependentSchemas`: an object without the name, or with what it needs, which comes first."""
    union = all_forms()
    for name, inner in _mapping(part, keyword, pointer).items():
        absent = (Object((Layer(((name, NOTHING),)),)),)
        if isinstance(inner, list):
            needed = tuple(_required(f"{keyword}/{name}", pointer, inner))
            present: Union = (Object(required=tuple(dict.fromkeys((*needed, name)))),)
        else:
            schema = rewriting.at(f"{pointer}/{keyword}/{escaped(name)}")
            present = rewriting.both(schema, (Object(required=(name,)),))
        others = all_forms(each for each in TYPES if each != "object")
        union = rewriting.both(union, (*others, *absent, *present))
    return union


def _unevaluated_properties(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """`unevaluatedProperties`: additionalProperties behind the names that all parts in place have."""
    demand = rewriting.demand(f"{pointer}/unevaluatedProperties")
    if demand == ANYTHING:
        return all_forms()
    names: dict[str, Demand] = {}
    patterns: dict[str, Demand] = {}
    for place in _in_place(rewriting, pointer, "unevaluatedProperties", set()):
        inner = rewriting.document.at(place)
        if "additionalProperties" in inner or ("unevaluatedProperties" in inner and place != pointer):
            return all_forms()
        names |= dict.fromkeys(_mapping(inner, "properties", place), ANYTHING)
        patterns |= dict.fromkeys(_mapping(inner, "patternProperties", place), ANYTHING)
    form = Object((Layer(tuple(names.items()), tuple(patterns.items()), demand),))
    return (*all_forms(each for each in TYPES if each != "object"), form)


def _unevaluated_items(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
    """`unevaluatedItems`: items behind the first ones that all parts in place have."""
    demand = rewriting.demand(f"{pointer}/unevaluatedItems")
    if demand == ANYTHING:
        return all_forms()
    count = 0
    for place in _in_place(rewriting, pointer, "unevaluatedItems", set()):
        inner = rewriting.document.at(place)
        if "contains" in inner:
            raise _inexact("unevaluatedItems beside contains", pointer)
        if "items" in inner or ("unevaluatedItems" in inner and place != pointer):
            return all_forms()
        if "prefixItems" in inner:
            count = max(count, len(rewriting.schemas(place, "prefixItems")))
    form = List((ANYTHING,) * count, demand)
    return (*all_forms(each for each in TYPES if each != "array"), form)


def _in_place(rewriting: Rewriting, pointer: str, keyword: str, seen: set[str]) -> list[str]:
    """Pointers of all parts that speak of every value here: the part itself, its `allOf` and `$ref`.

    Refused are keywords that speak of some of the values, such as `anyOf`.
    """
    part = rewriting.document.at(pointer)
    if not isinstance(part, Mapping) or pointer in seen:
        return []
    seen.add(pointer)
    for other in ("anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef"):
        if other in part:
            raise _inexact(f"{keyword} beside {other}", pointer)
    inner = rewriting.schemas(pointer, "allOf") if "allOf" in part else []
    if "$ref" in part:
        inner.append(rewriting.document.target(pointer, _string("$ref", pointer, part["$ref"])))
    return [pointer, *(place for each in inner for place in _in_place(rewriting, each, keyword, seen))]


def _refused(keyword: str) -> Rule:
    def rule(rewriting: Rewriting, pointer: str, part: Mapping[str, Any]) -> Union:
        raise UserError(f"{keyword} at {pointer} is of another draft; take $dynamicRef or $ref")

    return rule


Rule = Callable[[Rewriting, str, Mapping[str, Any]], Union]
RULES: dict[str, Rule] = {
    "$ref": _reference,
    "$dynamicRef": _dynamic_reference,
    "$recursiveRef": _refused("$recursiveRef"),
    "const": _constant,
    "enum": _enumeration,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependentRequired": partial(_dependent, keyword="dependentRequired"),
    "dependentSchemas": partial(_dependent, keyword="dependentSchemas"),
    "dependencies": partial(_dependent, keyword="dependencies"),
    "unevaluatedProperties": _unevaluated_properties,
    "unevaluatedItems": _unevaluated_items,
}


# --- values


def value_form(value: Any) -> Value:
    """Make the form that contains one JSON value, given by `const` or `enum` in a schema."""
    return Value(canonical(value), value)


def canonical(value: Any) -> str:
    """Write a JSON value as a text by which `Value` forms are compared; 1 and 1.0 have different texts."""
    match value:
        case None | bool():
            return str(value)
        case Written():
            return value.text
        case list():
            return f"[{','.join(map(canonical, value))}]"
        case dict():
            return "{" + ",".join(f"{name!r}:{canonical(inner)}" for name, inner in value.items()) + "}"
    return repr(value)


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal as JSON schemas compare them: 1 equals 1.0, but true does not equal 1."""
    return bool(comparable(one) == comparable(other))


def comparable(value: Any) -> Any:
    """Make a hashable key for a JSON value; equal values have equal keys, such as 1 and 1.0, but not true and 1."""
    match value:
        case list():
            return "array", tuple(map(comparable, value))
        case dict():
            return "object", frozenset((name, comparable(inner)) for name, inner in value.items())
    return type_of_value(value), value


def _named_once(value: Value, other: Form) -> Value:
    """A value that is also of another form; where that is of integers, the value is not written as 1.0."""
    as_given = value.as_given or (other.integer if isinstance(other, Number) else getattr(other, "as_given", False))
    return replace(value, as_given=as_given)


def _twice(items: Sequence[Any]) -> bool:
    return len(set(map(comparable, items))) < len(items)


def _other_values(value: Any, pointer: str) -> Union:
    match value:
        case None:
            return ()
        case bool():
            return (FALSE if value else TRUE,)
        case list() | dict():
            raise _inexact("a const of a list or an object", pointer)
    return (Number(below=Fraction(value)), Number(above=Fraction(value)))


def _other_numbers(form: Number, pointer: str) -> Union:
    if form.integer:
        raise _inexact("type integer", pointer)
    if form.multiples:
        raise _inexact("multipleOf", pointer)
    made: list[Form] = [Number(below=form.low)] if form.low is not None else []
    made += [Number(high=form.above)] if form.above is not None else []
    made += [Number(above=form.high)] if form.high is not None else []
    made += [Number(low=form.below)] if form.below is not None else []
    return tuple(made)


# --- what a keyword must be


def _inexact(what: str, pointer: str) -> UserError:
    return UserError(
        f"{what} at {pointer} is not enforced exactly where it is negated or counted; write the schema without"
    )


def _bad(keyword: str, pointer: str, given: Any, wanted: str) -> UserError:
    return UserError(f"{keyword} at {pointer} is {given!r}; give {wanted}")


def _string(keyword: str, pointer: str, given: Any) -> str:
    if not isinstance(given, str):
        raise _bad(keyword, pointer, given, "a string")
    return given


def _number(keyword: str, pointer: str, given: Any) -> Fraction | None:
    if given is None:
        return None
    if type_of_value(given) != "number":
        raise _bad(keyword, pointer, given, "a number")
    if isinstance(given, Written) and abs(given.adjusted()) > 400:
        raise _bad(keyword, pointer, given, "one that a float can be")
    return Fraction(given)


def _count(keyword: str, pointer: str, part: Mapping[str, Any]) -> int | None:
    given = part.get(keyword)
    if given is None:
        return None
    if type_of_value(given) != "number" or Fraction(given).denominator != 1 or given < 0:
        raise _bad(keyword, pointer, given, "an integer from 0 on")
    if given > MOST_COUNT:
        raise _bad(keyword, pointer, given, f"at most {MOST_COUNT}")
    return int(given)


def _pattern(keyword: str, pointer: str, given: Any) -> Node:
    try:
        return found(_string(keyword, pointer, given))
    except UserError as error:
        raise UserError(f"{keyword} at {pointer}: {error}") from None


def _mapping(part: Mapping[str, Any], keyword: str, pointer: str) -> Mapping[str, Any]:
    given = part.get(keyword, {})
    if not isinstance(given, Mapping):
        raise _bad(keyword, pointer, given, "an object")
    return given


def _required(keyword: str, pointer: str, given: Any) -> Iterable[str]:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise _bad(keyword, pointer, given, "a list of names")
    return given
