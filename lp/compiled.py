"""Compiled functions: numba compiles them where it is installed; elsewhere, and until they have been compiled in the
background (`lp.compile_cache`), the same code runs as Python, slower.

Also the mathematics that they need, of + - * / on doubles alone: every processor gives the same bits.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from lp.compile_cache import cache_folder, runs_compiled

COMPILED = runs_compiled()
if COMPILED:
    import numba


def _compiled(function: Any, inlined: bool = True) -> Any:
    """The function, compiled at its first call and cached on disk, in a folder for these very sources.

    numba alone would look at the function's own file, and go on using what it had compiled of functions that it calls.

    Args:
        inlined: it becomes part of all that call it.
    """
    # Nothing here allocates. With numba's runtime every call would count references to all arrays: half the time.
    options = {"nogil": True, "_nrt": False, "forceinline": inlined}
    folder = cache_folder()
    if folder is None:
        return numba.njit(**options)(function)
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        return numba.njit(cache=True, **options)(function)
    finally:
        numba.config.CACHE_DIR = before


jit: Any = _compiled if COMPILED else lambda function: function
jit_called: Any = partial(_compiled, inlined=False) if COMPILED else jit  # for what is long, and seldom called
U64: Any = np.uint64 if COMPILED else int  # unsigned 64-bit arithmetic: wrap it with & MASK, which Python's ints need
I64: Any = np.int64 if COMPILED else int


def compiled_array(array: np.ndarray) -> Any:
    """An array as compiled functions take it; Python indexes a memoryview far faster."""
    return array if COMPILED else memoryview(np.ascontiguousarray(array))  # type: ignore[arg-type]


def compiled_zeros(size: int, dtype: str) -> Any:
    """An array of zeros as compiled functions take it."""
    return compiled_array(np.zeros(size, dtype))


def compiled_ints(values: Any) -> Any:
    """Whole numbers as compiled functions take them."""
    return compiled_array(np.array(values, np.int64))


ROOT_HALF = math.sqrt(0.5)
LN_2 = math.log(2)
LOG2_E = 1 / math.log(2)
C_3, C_4, C_5, C_6, C_7, C_8 = (1 / math.factorial(power) for power in range(3, 9))
HALVINGS = compiled_array(2.0 ** -np.arange(1020.0))


MASK = U64((1 << 64) - 1)
GOLDEN = U64(0x9E3779B97F4A7C15)  # this and the next two: splitmix64's constants
MIX_1 = U64(0xBF58476D1CE4E5B9)
MIX_2 = U64(0x94D049BB133111EB)
ONE = U64(1)
S27, S30, S31 = U64(27), U64(30), U64(31)  # shifts


@jit
def mix(value):
    """splitmix64's finaliser of an unsigned 64-bit integer."""
    value = ((value ^ (value >> S30)) * MIX_1) & MASK
    value = ((value ^ (value >> S27)) * MIX_2) & MASK
    return value ^ (value >> S31)


@jit
def log(value):
    """Natural logarithm, to about 1e-10; only + - * / so that every processor gives the same."""
    mantissa, exponent = math.frexp(value)
    if mantissa < ROOT_HALF:
        mantissa, exponent = mantissa * 2, exponent - 1
    s = (mantissa - 1) / (mantissa + 1)
    z = s * s
    return 2 * s * (1 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11)))))) + exponent * LN_2


@jit
def exp(value):
    """Exponential of what is not positive, to about 1e-9; without a division, of which a step would take thousands."""
    if value < -700.0:
        return 0.0
    power = math.floor(value * LOG2_E + 0.5)
    r = value - power * LN_2
    series = C_5 + r * (C_6 + r * (C_7 + r * C_8))
    return (1 + r * (1 + r * (0.5 + r * (C_3 + r * (C_4 + r * series))))) * HALVINGS[-I64(power)]
