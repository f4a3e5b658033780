"""Regular expressions that match the JSON texts of all numbers in a range, to enforce the bounds of a JSON schema.

A JSON number is read as a binary float. So the bound "more than 0.1" is enforced as "at least the next float".
Otherwise the text 0.1000000000000000000001 would be allowed, which is read as 0.1.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

from lp.errors import UserError
from lp.sampling.schema_document import UnplacedError

INTEGER = "-?(?:0|[1-9][0-9]*)"
# With exponents that a float can have: what is read as infinite is no JSON when it is written again.
_LARGE = r"[0-9](?:\.[0-9]+)?[eE]\+?(?:[12][0-9]{2}|30[0-7])"
# 1.7976931348623157e308 is the largest.
_LARGEST = r"1(?:\.(?:[0-6][0-9]*|7(?:[0-8][0-9]*|9(?:[0-6][0-9]*|7[0-6]?|76931348623157)?)?))?[eE]\+?308"
NUMBER = (
    rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?|-?(?:{_LARGE}|{_LARGEST}|[0-9](?:\.[0-9]+)?[eE]-[0-9]{{3}})"
)
EXACT_INTEGERS = 1 << 53  # of floats; those beyond stand for their neighbours, too


def integer_terminal(low: int | None, high: int | None) -> str:
    """Write the right side of a Lark terminal that matches the integers from `low` to `high`, both included.

    Args:
        low, high: bounds from a JSON schema; None: no bound on this side.
    """
    return _both_signs(low, high, _integers_from, _integers_to, INTEGER)


def number_terminal(low: Fraction | None, high: Fraction | None) -> str:
    """Write the right side of a Lark terminal that matches the decimal numbers from `low` to `high`, both included.

    Args:
        low, high: bounds with finitely many decimals; None: no bound on this side.

    Raises:
        ValueError: a bound has infinitely many decimals, such as 1/3.
    """
    return _both_signs(
        low, high, _decimals_from, _decimals_to, NUMBER if low is high is None else rf"{INTEGER}(?:\.[0-9]+)?"
    )


def next_number(bound: Fraction, up: bool) -> Fraction:
    """Turn an exclusive bound into an inclusive one: the next float, as the exact decimal number that its repr shows.

    Args:
        bound: the exclusive bound.
        up: True: take the next larger float, for a lower bound. False: take the next smaller one, for an upper bound.

    Raises:
        ValueError: the bound is so large that not every integer is a float.
    """
    if abs(bound) >= EXACT_INTEGERS:
        raise UnplacedError(
            "a number",
            f"beyond {EXACT_INTEGERS} is not enforced exactly as an exclusive bound; take minimum or maximum",
        )
    near = float(bound)
    beside = math.nextafter(near, math.inf if up else -math.inf)
    return Fraction(Decimal(repr(beside)))


def _both_signs(low, high, at_least, at_most, any_text) -> str:  # type: ignore[no-untyped-def]
    if low is None and high is None:
        return f"/{any_text}/"
    parts: list[str] = []
    if high is None or high >= 0:
        parts.append(
            _one_sign(
                "", max(low, 0) if low is not None else 0, high, at_least, at_most, any_text, low is None or low <= 0
            )
        )
    if low is None or low < 0:
        least = max(-high, 0) if high is not None else 0
        parts.append(_one_sign("-", least, None if low is None else -low, at_least, at_most, any_text, least == 0))
    return "(" + " | ".join(parts) + ")"


def _one_sign(sign, low, high, at_least, at_most, any_text, from_zero) -> str:  # type: ignore[no-untyped-def]
    bare = any_text.removeprefix("-?")
    limits = [f"/{sign}{bare}/"]
    if not from_zero or low > 0:
        limits.append(f"/{sign}(?:{at_least(low)})/")
    if high is not None:
        limits.append(f"/{sign}(?:{at_most(high)})/")
    return "(" + " & ".join(limits) + ")"


def _digits_from(digits: str, tail: str) -> list[str]:
    """Expressions of texts that begin with as many digits as these, and a larger number; the digits themselves not.

    Args:
        digits: such as "250".
        tail: "same": texts have as many digits; "any": any digits may follow, as behind a decimal point.
    """
    ways = []
    for at, digit in enumerate(digits):
        if digit != "9":
            rest = len(digits) - at - 1
            ways.append(
                f"{digits[:at]}[{int(digit) + 1}-9]"
                + (f"[0-9]{{{rest}}}" if rest and tail == "same" else "")
                + ("[0-9]*" if tail == "any" else "")
            )
    return ways


def _digits_to(digits: str, tail: str) -> list[str]:
    ways = []
    for at, digit in enumerate(digits):
        if digit != "0":
            rest = len(digits) - at - 1
            ways.append(
                f"{digits[:at]}[0-{int(digit) - 1}]"
                + (f"[0-9]{{{rest}}}" if rest and tail == "same" else "")
                + ("[0-9]*" if tail == "any" else "")
            )
    return ways


def _integers_from(low: int) -> str:
    digits = str(low)
    return "|".join([*_digits_from(digits, "same"), digits, f"[1-9][0-9]{{{len(digits)},}}"])


def _integers_to(high: int) -> str:
    digits = str(high)
    shorter = [f"[0-9]{{1,{len(digits) - 1}}}"] if len(digits) > 1 else []
    return "|".join([*_digits_to(digits, "same"), digits, *shorter])


def _decimals_from(low: Fraction) -> str:
    whole, decimals = _decimal(low)
    ways = [rf"(?:{_integers_from(whole + 1)})(?:\.[0-9]+)?"]
    if decimals:
        more = "|".join([*_digits_from(decimals, "any"), f"{decimals}[0-9]*"])
        ways.append(rf"{whole}\.(?:{more})")
    else:
        ways.append(rf"{whole}(?:\.[0-9]+)?")
    return "|".join(ways)


def _decimals_to(high: Fraction) -> str:
    whole, decimals = _decimal(high)
    ways = [rf"(?:{_integers_to(whole - 1)})(?:\.[0-9]+)?"] if whole else []
    # Fewer decimals, which begin as the bound's do, are less or as much; so are zeros behind all of them.
    same = [rf"{decimals[:at]}" for at in range(1, len(decimals))]
    less = "|".join([*_digits_to(decimals, "any"), *same, f"{decimals}0*" if decimals else "0+"])
    ways.append(rf"{whole}(?:\.(?:{less}))?")
    return "|".join(ways)


def _decimal(bound: Fraction) -> tuple[int, str]:
    """The integer part of a bound, and its decimals without zeros at the end."""
    whole, rest = divmod(bound, 1)
    digits = ""
    while rest:
        digit, rest = divmod(rest * 10, 1)
        digits += str(digit)
        if len(digits) > 1100:
            raise UserError("a number without an end of its decimals")
    return int(whole), digits
