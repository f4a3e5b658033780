"""Checks of users' settings and arguments, with errors that name the value, the limit and the remedy.

Numbers of numpy, and integers of torch, are accepted like Python's. The checks return Python's own int or float, so
that settings print the same on every rank and can be compared.
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
    """Convert an integer of Python, numpy or torch to int; None if the value is a bool or no integer.

    Args:
        value: any object that a user gave, such as 3 or np.int64(3); 3.0 is no integer.
    """
    try:
        return None if isinstance(value, bool | np.bool_) or getattr(value, "ndim", None) else operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float | None:
    """Convert a number of Python or numpy to float; None if the value is a bool, NaN, too large or no number.

    Args:
        value: any object that a user gave.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number


def flat_list(value: Any) -> list[Any]:
    """Convert a tensor or array of any shape, or an iterable, to one list; a lone value becomes a list of one.

    Args:
        value: such as torch.tensor([[1, 2]]), which gives [1, 2], or 3, which gives [3].
    """
    if hasattr(value, "reshape"):
        elements: list[Any] = value.reshape(-1).tolist()
        return elements
    return list(value) if isinstance(value, Iterable) else [value]


def check_int(name: str, value: object, low: int, high: float, remedy: str) -> int:
    """Convert a value to int, and refuse it if it is no integer in [low, high].

    Args:
        name: what the error calls the value, such as "max_new_tokens".
        value: the value that a user gave.
        low, high: limits, both allowed; math.inf: no upper limit.
        remedy: end of the error message, such as "try 512".

    Raises:
        ValueError: names the value, the limit and the remedy.
    """
    number = as_int(value)
    if number is None or not low <= number <= high:
        limit = f"an integer >= {low}" if high == math.inf else f"an integer in [{low}, {int(high)}]"
        raise UserError(f"{name} is {value!r}; it must be {limit}; {remedy}")
    return number


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise an error if a value has a wrong type.

    Args:
        name: what the error calls the value, such as "sampling".
        value: the value that a user gave.
        kinds: the allowed type, or a tuple of allowed types.
        wanted: what the error says to give, such as "lp.SamplingParams, or None for greedy".

    Raises:
        ValueError: names the value and what to give.
    """
    if not isinstance(value, kinds):
        raise UserError(f"{name} is {value!r}; give {wanted}")


def check_callback(name: str, value: object, wanted: str) -> None:
    """Refuse a callback that can't be called; None is allowed, for no callback.

    Args:
        name: what the error calls the callback, such as "on_tokens".
        value: the callback that a user gave.
        wanted: what the error says to give, such as "a function of (new tokens, step), or None".

    Raises:
        ValueError: names the value and what to give.
    """
    if not (value is None or callable(value)):
        raise UserError(f"{name} is {value!r}; give {wanted}")


def check_callables(name: str, values: Any, wanted: str) -> list[Any]:
    """Convert an iterable of callables to a list; None gives an empty list, as in transformers.

    Args:
        name: what the error calls the argument, such as "logits_processor".
        values: the iterable that a user gave, or None.
        wanted: what the error says to give.

    Raises:
        ValueError: the value is not iterable, or an element can't be called; says what to give.
    """
    elements = [] if values is None else values
    check_kind(name, elements, Iterable, wanted)
    called = list(elements)
    for each in called:
        if not callable(each):
            raise UserError(f"{name} has {each!r}; give {wanted}")
    return called


def env_int(name: str, default: int, low: int = 0, high: float = math.inf) -> int:
    """Read an environment variable that a launcher sets to an integer, such as WORLD_SIZE.

    Args:
        name: name of the variable.
        default: result if the variable is not set.
        low, high: limits, both allowed; math.inf: no upper limit.

    Raises:
        UserError: the value is no integer within the limits; names the variable, its value and the remedy.
    """
    text = os.environ.get(name, str(default))
    value = int(text) if text.strip().isdecimal() else text
    return check_int(name, value, low, high, "launch with torchrun, or unset WORLD_SIZE for one process")


def check_count(config: object, name: str, low: int, high: float, remedy: str, letter: str = "") -> None:
    """Check that a field of a frozen config is an integer in [low, high], and store it as an int.

    The config's `__post_init__` calls it.

    Args:
        config: the config that is being made.
        name: name of the field.
        low, high: limits, both allowed; math.inf: no upper limit.
        remedy: end of the error message, such as "try 16".
        letter: the paper's name of the field for the error message, such as "W"; empty: the paper has no name for it.

    Raises:
        ValueError: names the value, the limit and the remedy.
    """
    called = f"{name} ({letter})" if letter else name
    set_field(config, name, check_int(called, getattr(config, name), low, high, remedy))


def check_switch(name: str, value: Any) -> bool:
    """Convert True, False, 1, 0 or a bool of numpy to bool, and refuse all other values.

    A string such as "false" is refused because Python takes it for true.

    Args:
        name: what the error calls the value.
        value: the value that a user gave.

    Raises:
        ValueError: names the value.
    """
    if getattr(value, "ndim", 0) or value not in (True, False):
        raise UserError(f"{name} is {value!r}; give True or False")
    return bool(value)


def check_switches(config: object, *names: str) -> None:
    """Check by `check_switch` that fields of a frozen config are switches, and store them as bools.

    The config's `__post_init__` calls it.

    Args:
        config: the config that is being made.
        names: names of the fields.

    Raises:
        ValueError: names the field and its value.
    """
    for name in names:
        set_field(config, name, check_switch(name, getattr(config, name)))


def check_choice(config: object, name: str, choices: type[StrEnum]) -> None:
    """Check that a field of a frozen config is one of an enum's choices, and store it as the enum's member.

    The config's `__post_init__` calls it.

    Args:
        config: the config that is being made.
        name: name of the field, whose value may be a member of the enum or a member's string.
        choices: the enum.

    Raises:
        ValueError: names the value and the choices.
    """
    value = getattr(config, name)
    if value not in list(choices):
        raise UserError(f"{name} is {value!r}; it must be one of {[str(choice) for choice in choices]}")
    set_field(config, name, choices(value))


def check_real(name: str, value: object, low: float, high: float, remedy: str) -> float:
    """Convert a value to float, and refuse it if it is no number in [low, high].

    Args:
        name: what the error calls the value, such as "timeout_s".
        value: the value that a user gave.
        low, high: limits, both allowed.
        remedy: end of the error message, such as "try 120 (seconds)".

    Raises:
        ValueError: names the value, the limit and the remedy.
    """
    number = as_float(value)
    if number is None or not low <= number <= high:
        raise UserError(f"{name} is {value!r}; it must be a number in [{low}, {high}]; {remedy}")
    return number


def set_field(config: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass, so that its `__post_init__` can store a checked value."""
    object.__setattr__(config, name, value)
