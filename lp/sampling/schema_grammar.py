"""Turns a JSON schema into a grammar of the JSON values that it allows, with fixed white space.

There is one space after each comma and colon, and no other white space. Properties come in the schema's order, and
properties that the schema does not name come after them. A number from `enum` or `const` is written as in the schema.
In strings, ASCII characters are written as json.dumps writes them, other characters directly or as \\u escapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations, permutations, product
from typing import Any

from lp.errors import UserError
from lp.sampling.language_checks import has_no_text
from lp.sampling.lark import MOST_RULES, Lark, Lexeme, Mark, Part, Unique, to_lark
from lp.sampling.number_syntax import EXACT_INTEGERS, integer_terminal, next_number, number_terminal
from lp.sampling.regex_syntax import (
    ANY,
    ANYTHING,
    EMPTY,
    Alt,
    And,
    Node,
    Not,
    Repeat,
    Rule,
    Seq,
    found,
    in_json,
    literal,
    terminal,
)
from lp.sampling.schema_document import Document, UnplacedError, Written
from lp.sampling.schema_forms import NOTHING, Contained, Demand, Form, List, Number, Object, Text, Value
from lp.sampling.schema_rewriting import Rewriting, comparable, text_language

MOST_STATES = 5_000  # of one object: a state for each name and number of properties before it; 300 µs each
MOST_PATTERNS = 5  # of names of one object: every set of them is another kind of name
MOST_UNIQUE = 64
MOST_ORDERED = 3  # names in any order, where the schema has none

NO_INTEGER = "of a number that is no integer is not enforced exactly; take an integer"

COMMA = Lexeme('", "', 2)
COLON = Lexeme('": "', 2)
NEVER = Lexeme("(/a/ & /b/)", 1)  # without a text


def schema_to_lark(text: str) -> Lark:
    """Turn a JSON schema into a Lark grammar of the JSON values that it allows.

    Args:
        text: the schema as JSON text.

    Raises:
        ValueError: the text is no schema; or a keyword, which the message names with its place, can't be enforced
            exactly; or the schema allows no value.
    """
    document = Document(text)
    rewriting = Rewriting(document)
    try:
        rules = _Rules(rewriting)
        root = rules.rule(rewriting.demand("#"))
        rules.write()
        return to_lark(rules.rules, root)
    except RecursionError:
        raise UserError("it is nested too deep; name parts of it in $defs") from None


class _Rules:
    """Writes a grammar rule for each demand on a value (a set of places in the schema), and for those that it needs.

    Attributes:
        rules: body of each rule, by its name.
    """

    def __init__(self, rewriting: Rewriting) -> None:
        self.rules: dict[str, Part] = {}
        self._rewriting = rewriting
        self._names: dict[Demand, str] = {}
        self._waiting: list[Demand] = []
        self._states = 0

    def rule(self, demand: Demand) -> str:
        """The name of a demand's rule, which `write` will write."""
        if demand not in self._names:
            self._names[demand] = f"v{len(self._names)}"
            self._waiting.append(demand)
        return self._names[demand]

    def write(self) -> None:
        """Write the rules that were asked for, and all rules that these need."""
        while self._waiting:
            demand = self._waiting.pop()
            forms = self._rewriting.union(demand)
            scalars = [
                constant(form.value, self._named, form.as_given)
                for form in forms
                if isinstance(form, Value) and not _has_parts(form.value)
            ]
            parts = [_either([lexeme for lexemes in scalars for lexeme in lexemes])] if scalars else []
            parts += [
                self._placed(form) for form in forms if not (isinstance(form, Value) and not _has_parts(form.value))
            ]
            self.rules[self._names[demand]] = _alt(*parts)

    def _value(self, demand: Demand) -> Node:
        return Rule(self.rule(demand))

    def _named(self, part: Part) -> Node:
        """Make a rule of a part, to be named wherever the part is needed."""
        if self._states >= MOST_RULES:  # before they fill the memory
            raise UserError(f"the grammar has more than {MOST_RULES} rules; ask for less of the form")
        name = f"s{self._states}"
        self._states += 1
        self.rules[name] = part
        return Rule(name)

    def _placed(self, form: Form) -> Part:
        """The part for a form; a refusal names the places that the form comes from."""
        try:
            return self._form(form)
        except UnplacedError as error:
            raise error.at(*self._rewriting.where(form, error.what)) from None

    def _form(self, form: Form) -> Part:
        match form:
            case Value(_, value):
                return _seq(*constant(value, self._named))
            case Number():
                return number_lexeme(form)
            case Text():
                if form.languages:
                    return _or_never(string_lexeme(text_language(form), form.least))
                return string_lexeme(Repeat(ANY, form.least, form.most), form.least)
            case List():
                return self._list(form)
            case Object():
                return self._object(form)
        raise AssertionError(form)

    # --- lists

    def _list(self, form: List) -> Part:
        known = self._unique_items(form) if form.unique and form.most not in (0, 1) else None
        items = self._items(form) if known is None else known
        written = _seq(Lexeme('"["', 1), items, Lexeme('"]"', 1))
        return _alt(written, Mark()) if form.unique and known is None else written

    def _items(self, form: List) -> Part:
        if form.most == 0:
            return EMPTY
        if form.contained:
            return self._contained_items(form)
        count = min(len(form.first), form.most) if form.most is not None else len(form.first)
        rest = self._value(form.rest)
        more = None if form.most is None else form.most - count
        least = max(form.least - count, 0)
        if count:
            tail: Part = _repeat(_seq(COMMA, rest), least, more)
        elif least:
            tail = _seq(rest, _repeat(_seq(COMMA, rest), least - 1, None if more is None else more - 1))
        else:
            tail = _alt(EMPTY, _seq(rest, _repeat(_seq(COMMA, rest), 0, None if more is None else more - 1)))
        for index in reversed(range(count)):
            item = self._value(form.first[index])
            tail = _seq(COMMA, item, tail) if index else _seq(item, tail)
            tail = tail if index < form.least else _alt(EMPTY, tail)
            tail = self._named(tail)
        return tail

    def _contained_items(self, form: List) -> Part:
        if len(form.contained) > 1 or form.first:
            raise UnplacedError(
                "contains", "beside prefixItems or another contains is not enforced exactly; leave one of them out"
            )
        (contained,) = form.contained
        if form.least > contained.least or form.most is not None:
            raise UnplacedError(
                "contains", "beside minItems or maxItems is not enforced exactly; leave one of them out"
            )
        return self._counted_items(contained, form.rest)

    def _counted_items(self, contained: Contained, rest: Demand) -> Part:
        found_ = self._value(contained.demand | rest)
        other = self._value(contained.others | rest)
        before, behind = _repeat(_seq(other, COMMA), 0, None), _repeat(_seq(COMMA, other), 0, None)
        least = max(contained.least, 1)
        most = None if contained.most is None else contained.most - 1
        some: Part = _seq(before, found_, _repeat(_seq(behind, COMMA, found_), least - 1, most), behind)
        if contained.most == 0:
            return _alt(EMPTY, _seq(other, behind))
        return some if contained.least else _alt(EMPTY, _seq(other, behind), some)

    def _unique_items(self, form: List) -> Part | None:
        """The items where they are of a few values; None where the items before must be known besides.

        Raises:
            ValueError: items may be left of which none is another one.
        """
        forms = self._rewriting.union(form.rest)
        if form.contained:
            raise UserError(
                f"uniqueItems at {form.unique} beside contains is not enforced exactly; leave one of them out"
            )
        few = all(isinstance(each, Value) for each in forms)
        values: dict[Any, Value] = {}
        for each in forms:
            if isinstance(each, Value):
                values.setdefault(comparable(each.value), each)
        if form.first or not few:
            demands = [*form.first[: form.least], form.rest] if form.least else [*form.first, form.rest]
            for demand in demands:
                self._check_unique(form, demand)
            return None
        if len(values) > MOST_UNIQUE:
            return None if form.least <= len(values) else Alt()
        most = len(values) if form.most is None else min(form.most, len(values))
        if not most:
            return Alt() if form.least else EMPTY
        parts = tuple(tuple(constant(each.value, self._named, each.as_given)) for each in values.values())
        return Unique(parts, COMMA, form.least, most)

    def _check_unique(self, form: List, demand: Demand) -> None:
        """Refuse items of which a text could be left that can only end as one that came before."""
        forms = self._rewriting.union(demand)
        lists = [each for each in forms if isinstance(each, List) and each != List()]
        objects = [each for each in forms if isinstance(each, Object) and each != Object()]
        numbers = [each for each in forms if isinstance(each, Number) and not each.integer and each != Number()]
        parts = [each for each in forms if isinstance(each, Value) and _has_parts(each.value)]
        kinds = {"lists": lists or parts, "objects": objects or parts, "numbers with decimals and bounds": numbers}
        for kind, found_ in kinds.items():
            if found_:
                raise UserError(
                    f"uniqueItems at {form.unique} is not enforced exactly of {kind} that have a schema; leave it out, "
                    "and check the list"
                )
        if form.least > 1 and forms and all(isinstance(each, Value) for each in forms):
            raise UserError(
                f"uniqueItems at {form.unique} with minItems {form.least} is not enforced exactly of an enum beside "
                "prefixItems; leave one of them out"
            )

    # --- objects

    def _object(self, form: Object) -> Part:
        ordered = dict.fromkeys([name for layer in form.layers for name, _ in layer.named] + [*form.required])
        names = [name for name in ordered if form.names == frozenset() or self._rewriting.has(form.names, name)]
        if any(name not in names for name in form.required):
            return Alt()
        more = self._other_properties(form, [*ordered])
        inner = self._properties(form, names, more)
        return _seq(Lexeme('"{"', 1), inner, Lexeme('"}"', 1))

    def _properties(self, form: Object, names: Sequence[str], more: Part | None) -> Part:
        """States by the next name, and by how many properties came, as far as that matters."""
        if form.least > len(form.required) + 1 and more is not None:
            raise UnplacedError(
                "minProperties",
                f"is {form.least}, which with {len(form.required)} required names is not enforced exactly where "
                "other names may come, as one could come twice; forbid these by additionalProperties",
            )
        most = form.most if form.most is not None and (more is not None or form.most < len(names)) else None
        cap = max(form.least, most or 0, 1)
        states = sum(min(index, cap) + 1 for index in range(len(names) + 1))
        if cap > 1 and states > MOST_STATES:
            raise UnplacedError(
                "minProperties" if most is None else "maxProperties",
                f"of {len(names)} names has {states} states, of at most {MOST_STATES}; ask for fewer",
            )
        ends = [self._end(form, came, most, more) for came in range(min(len(names), cap) + 1)]
        if self._is_without_order(form, names):
            return self._any_order(form, names, most, ends)
        behind = ends
        for index in reversed(range(len(names))):
            name = names[index]
            pair = _seq(name_lexeme(name), COLON, self._value(self._rewriting.property(form, name)))
            required = name in form.required
            made: list[Part] = []
            for came in range(min(index, cap) + 1):
                full = most is not None and came >= most
                there = Alt() if full else _seq(*([COMMA] if came else []), pair, behind[min(came + 1, cap)])
                made.append(self._named(there if required else _alt(there, behind[came])))
            behind = made
        return behind[0]

    def _is_without_order(self, form: Object, names: Sequence[str]) -> bool:
        """Whether names are few, and no `properties` has all of them in an order."""
        whole = any({*names} <= {name for name, _ in layer.named} for layer in form.layers)
        return 1 < len(names) <= MOST_ORDERED and not whole

    def _any_order(self, form: Object, names: Sequence[str], most: int | None, ends: Sequence[Part]) -> Part:
        """States by the names that came."""
        states: dict[frozenset[str], Part] = {}
        for taken in (frozenset(each) for count in range(len(names), -1, -1) for each in combinations(names, count)):
            ways: list[Part] = [ends[min(len(taken), len(ends) - 1)]] if {*form.required} <= taken else []
            for name in names:
                if name not in taken and (most is None or len(taken) < most):
                    pair = _seq(name_lexeme(name), COLON, self._value(self._rewriting.property(form, name)))
                    ways.append(_seq(*([COMMA] if taken else []), pair, states[taken | {name}]))
            states[taken] = self._named(_alt(*ways))
        return states[frozenset()]

    def _end(self, form: Object, came: int, most: int | None, more: Part | None) -> Part:
        """What may follow the last named property: as many others as there is room for."""
        room = None if most is None else most - came
        needed = max(form.least - came, 0)
        if more is None or room == 0:
            return Alt() if needed else EMPTY
        behind = _repeat(_seq(COMMA, more), 0 if came == 0 else needed, None if room is None else room - (came == 0))
        if came:
            return self._named(behind)
        first = _seq(more, _repeat(_seq(COMMA, more), max(needed - 1, 0), None if room is None else room - 1))
        return self._named(first if needed else _alt(EMPTY, first))

    def _other_properties(self, form: Object, names: Sequence[str]) -> Part | None:
        """A property without a name in the schema; None where there is none."""
        patterns = list(dict.fromkeys(pattern for layer in form.layers for pattern, _ in layer.patterns))
        if len(patterns) > MOST_PATTERNS:
            raise UnplacedError(
                "patternProperties", f"has {len(patterns)} patterns, of at most {MOST_PATTERNS}; write it with fewer"
            )
        languages = [found(pattern) for pattern in patterns]
        by_demand: dict[Demand, list[Node]] = {}
        for matched in product((False, True), repeat=len(patterns)):
            here = {pattern for pattern, is_one in zip(patterns, matched, strict=True) if is_one}
            demand = frozenset[Any]()
            for layer in form.layers:
                own = [inner for pattern, inner in layer.patterns if pattern in here]
                demand = demand.union(*own) if own else demand | layer.rest
            if demand >= NOTHING:
                continue
            parts = [each if is_one else Not(each) for each, is_one in zip(languages, matched, strict=True)]
            by_demand.setdefault(demand, []).append(And((ANYTHING, *parts)) if parts else ANYTHING)
        taken = [Not(literal(name)) for name in names]
        pairs: list[Part] = []
        for demand, kinds in by_demand.items():
            for key in self._keys(form.names):
                language: Node = kinds[0] if len(kinds) == 1 else Alt(tuple(kinds))
                if taken or key is not None:
                    language = And((ANYTHING, *((key,) if key is not None else ()), language, *taken))
                pairs.append(_seq(_or_never(string_lexeme(language, 0)), COLON, self._value(demand)))
        if not pairs:
            return None
        return self._named(_alt(*pairs))

    def _keys(self, names: Demand) -> list[Node | None]:
        """The languages of names; None of any."""
        if not names:
            return [None]
        keys: list[Node | None] = []
        for form in self._rewriting.union(names):
            if isinstance(form, Text):
                keys.append(text_language(form) if form != Text() else None)
            elif isinstance(form, Value) and isinstance(form.value, str):
                keys.append(literal(form.value))
        return [None] if None in keys else keys


# --- lexemes


def _seq(*parts: Part) -> Node:
    return Seq(tuple(inner for part in parts for inner in (part.parts if isinstance(part, Seq) else (part,))))  # type: ignore[misc]


def _alt(*parts: Part) -> Node:
    return Alt(parts)  # type: ignore[arg-type]


def _repeat(part: Part, least: int, most: int | None) -> Node:
    return EMPTY if most == 0 else Repeat(part, least, most)  # type: ignore[arg-type]


def _has_parts(value: Any) -> bool:
    return isinstance(value, list | dict)


def _either(lexemes: Sequence[Any]) -> Part:
    """One lexeme for many: a place of the text is then looked at once."""
    if len(lexemes) == 1:
        return lexemes[0]  # type: ignore[no-any-return]
    sides = " | ".join(lexeme.right_side for lexeme in lexemes)
    return Lexeme(f"({sides})", min(lexeme.length for lexeme in lexemes))


def string_lexeme(language: Node, length: int) -> Lexeme:
    """Make the lexeme (a part that llguidance's lexer reads in one piece) for JSON strings, quotes included.

    Args:
        language: syntax tree of a regular expression that matches the strings' characters before they are escaped.
        length: number of characters of the shortest string, without quotes.
    """
    return Lexeme(rf'"\"" {terminal(language, in_json)} "\""', length + 2)


def _or_never(lexeme: Lexeme) -> Lexeme:
    """The lexeme; NEVER if it has no text. Looked for here, where a refusal can still name its place."""
    return NEVER if has_no_text(lexeme.right_side) else lexeme


def name_lexeme(name: str) -> Lexeme:
    """Make the lexeme (a part that llguidance's lexer reads in one piece) for one JSON string.

    Args:
        name: the string, such as a property's name, without quotes and escapes.
    """
    return string_lexeme(literal(name), len(name))


def constant(value: Any, named: Callable[[Part], Part], as_given: bool = False) -> list[Part]:
    """Make the rule parts that write one given JSON value, with the grammar's white space.

    Args:
        value: the value as the schema has it.
        named: function that makes a rule from a part and returns a reference to the rule. It is used for an object, so
            that the allowed orders of its properties are written only once.
        as_given: whether a number is written only as in the schema; otherwise 1 may also be written as 1.0.
    """
    match value:
        case str():
            return [name_lexeme(value)]
        case list():
            items = [constant(each, named) for each in value]
            return [Lexeme('"["', 1), *_with_commas(items), Lexeme('"]"', 1)]
        case dict():
            pairs = [[name_lexeme(name), COLON, *constant(inner, named)] for name, inner in value.items()]
            orders = permutations(pairs) if len(pairs) <= MOST_ORDERED else [pairs]
            either = named(_alt(*(_seq(*_with_commas(order)) for order in orders)))
            return [Lexeme('"{"', 1), either, Lexeme('"}"', 1)]
        case None | bool():
            text = json.dumps(value)
            return [Lexeme(json.dumps(text), len(text))]
    texts = [value.text if isinstance(value, Written) else str(value)]
    if not as_given and abs(value) <= EXACT_INTEGERS and value == int(value):
        texts += [str(int(value)), f"{int(value)}.0"]
    return [_either([Lexeme(json.dumps(text), len(text)) for text in dict.fromkeys(texts)])]


def _with_commas(items: Sequence[Sequence[Part]]) -> list[Part]:
    return [part for index, item in enumerate(items) for part in ([COMMA, *item] if index else item)]


def number_lexeme(form: Number) -> Lexeme:
    """Make the lexeme (a part that llguidance's lexer reads in one piece) for the numbers in a range.

    Args:
        form: the range, and the numbers that each number must be a multiple of.

    Raises:
        ValueError: no lexeme matches exactly these numbers, for example with a `multipleOf` of 0.5.
    """
    low, high = form.low, form.high
    integer = form.integer or any(each.denominator == 1 for each in form.multiples)
    if integer:
        lows = [-(-form.low // 1)] if form.low is not None else []
        lows += [form.above // 1 + 1] if form.above is not None else []
        highs = [form.high // 1] if form.high is not None else []
        highs += [-(-form.below // 1) - 1] if form.below is not None else []
        least, most = max(map(int, lows), default=None), min(map(int, highs), default=None)
        if least is not None and most is not None and least > most:
            return NEVER
        if form.multiples:
            return _multiple(form, {"type": "integer", "minimum": least, "maximum": most})
        return Lexeme(integer_terminal(least, most), 1)
    if form.above is not None and (low is None or form.above >= low):
        low = next_number(form.above, up=True)
    if form.below is not None and (high is None or form.below <= high):
        high = next_number(form.below, up=False)
    if form.multiples:
        raise UnplacedError("multipleOf", NO_INTEGER)
    if low is not None and high is not None and low > high:
        return NEVER
    return Lexeme(number_terminal(low, high), 1)


def _multiple(form: Number, schema: dict[str, Any]) -> Lexeme:
    """Multiples of an integer, within bounds, by llguidance's own arithmetic."""
    schema = {name: given for name, given in schema.items() if given is not None}
    bounds = [abs(given) for given in schema.values() if isinstance(given, int)]
    if len(form.multiples) > 1 or max(bounds, default=0) > EXACT_INTEGERS:
        raise UnplacedError(
            "multipleOf", "with another one, or with bounds beyond 2^53, is not enforced exactly; write one of them"
        )
    (multiple,) = form.multiples
    if multiple.denominator != 1:
        raise UnplacedError("multipleOf", NO_INTEGER)
    if "minimum" in schema and "maximum" in schema and schema["maximum"] // multiple * multiple < schema["minimum"]:
        return NEVER
    schema["multipleOf"] = int(multiple)
    return Lexeme(f"%json {json.dumps(schema)}", 1)
