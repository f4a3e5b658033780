"""Checks of what a user gives: numbers and choices, each refused with its value, its limit and the remedy.

Numpy's and torch's scalars are taken for the numbers that they are; what is stored is Python's own int or float, so
that settings read the same on every rank.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from enum import StrEnum
from numbers import Real
from typing import Any

import numpy as np

from lp.errors import UserError


def as_int(value: Any) -> int | None:
    """The int that a value is, as an index would take it; None for a bool, numpy's too, and for what is no integer."""
    try:
        return None if isinstance(value, bool | np.bool_) or getattr(value, "ndim", None) else operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float | None:
    """The float that a number is; None for a bool, for NaN, and for what is no number or too large for one."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number


def flat_list(value: Any) -> list[Any]:
    """The elements of a tensor or an array of any shape, of an iterable, or a lone value."""
    if hasattr(value, "reshape"):
        elements: list[Any] = value.reshape(-1).tolist()
        return elements
    return list(value) if isinstance(value, Iterable) else [value]


def check_int(name: str, value: object, low: int, high: float, remedy: str) -> int:
    """The int that a value is, refused outside [low, high].

    Raises:
        ValueError: names the value, the limit and the remedy.
    """
    number = as_int(value)
    if number is None or not low <= number <= high:
        limit = f"an integer >= {low}" if high == math.inf else f"an integer in [{low}, {int(high)}]"
        raise UserError(f"{name} is {value!r}; it must be {limit}; {remedy}")
    return number


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuse a value that is of none of these types.

    Args:
        wanted: what to give, such as "lp.SamplingParams, or None for greedy".

    Raises:
        ValueError: names the value and what to give.
    """
    if not isinstance(value, kinds):
        raise UserError(f"{name} is {value!r}; give {wanted}")


def check_callback(name: str, value: object, wanted: str) -> None:
    """Refuse what can't be called; None is no callback.

    Raises:
        ValueError: names the value and what to give.
    """
    if not (value is None or callable(value)):
        raise UserError(f"{name} is {value!r}; give {wanted}")


def check_callables(name: str, values: Any, wanted: str) -> list[Any]:
    """The elements of an iterable of what can be called; None has none, as in transformers.

    Raises:
        ValueError: names the value and what to give.
    """
    elements = [] if values is None else values
    check_kind(name, elements, Iterable, wanted)
    called = list(elements)
    for each in called:
        if not callable(each):
            raise UserError(f"{name} has {each!r}; give {wanted}")
    return called


def env_int(name: str, default: int, low: int = 0, high: float = math.inf) -> int:
    """An integer that a launcher has put into the environment.

    Raises:
        UserError: names the variable, its value and the remedy.
    """
    text = os.environ.get(name, str(default))
    value = int(text) if text.strip().isdecimal() else text
    return check_int(name, value, low, high, "launch with torchrun, or unset WORLD_SIZE for one process")


def check_count(config: object, name: str, low: int, high: float, remedy: str, letter: str = "") -> None:
    """Refuse a field of a frozen config outside [low, high], and make it an int.

    Args:
        letter: what the field is called elsewhere, such as W.

    Raises:
        ValueError: names the value, the limit and the remedy.
    """
    called = f"{name} ({letter})" if letter else name
    set_field(config, name, check_int(called, getattr(config, name), low, high, remedy))


def check_switch(name: str, value: Any) -> bool:
    """True or False, of these, of numpy's, or of 1 and 0.

    Raises:
        ValueError: names the value; a string is true, whatever it says.
    """
    if getattr(value, "ndim", 0) or value not in (True, False):
        raise UserError(f"{name} is {value!r}; give True or False")
    return bool(value)


def check_switches(config: object, *names: str) -> None:
    """Refuse fields of a frozen config that are neither true nor false, and make them Python's own.

    Raises:
        ValueError: names the value.
    """
    for name in names:
        set_field(config, name, check_switch(name, getattr(config, name)))


def check_choice(config: object, name: str, choices: type[StrEnum]) -> None:
    """Refuse anything but a member or its value, and make a field of a frozen config the member.

    Raises:
        ValueError: names the value and the choices.
    """
    value = getattr(config, name)
    if value not in list(choices):
        raise UserError(f"{name} is {value!r}; it must be one of {[str(choice) for choice in choices]}")
    set_field(config, name, choices(value))


def check_real(name: str, value: object, low: float, high: float, remedy: str) -> float:
    """The float that a number is, refused outside [low, high].

    Raises:
        ValueError: names the value, the limit and the remedy.
    """
    number = as_float(value)
    if number is None or not low <= number <= high:
        raise UserError(f"{name} is {value!r}; it must be a number in [{low}, {high}]; {remedy}")
    return number


def set_field(config: object, name: str, value: object) -> None:
    """Give a field of a frozen config its checked value, while it is being made."""
    object.__setattr__(config, name, value)
