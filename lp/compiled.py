"""`jit`, which compiles lp's inner loops by numba, and the arrays and mathematics that compiled functions use.

Without numba, and until functions have been compiled in the background (`lp.compile_cache`), the same code runs as
Python, which is slower. The mathematics uses only + - * / on doubles, so that every processor gives the same bits.
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
    """Let numba compile a function at its first call, and cache it on disk in a folder for these very sources.

    With its default folder, numba would only notice changes of the function's own file, and use stale code of the
    functions that it calls.

    Args:
        function: the function.
        inlined: whether to inline it in the functions that call it.
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
jit_called: Any = partial(_compiled, inlined=False) if COMPILED else jit  # for long functions that are seldom called
U64: Any = np.uint64 if COMPILED else int  # unsigned 64-bit arithmetic: wrap it with & MASK, which Python's ints need
I64: Any = np.int64 if COMPILED else int


def compiled_array(array: np.ndarray) -> Any:
    """Prepare an array for a numba function: the array itself, or a memoryview where functions run as Python.

    Python indexes a memoryview much faster than an array. Both share the array's memory, if it is contiguous.
    """
    return array if COMPILED else memoryview(np.ascontiguousarray(array))  # type: ignore[arg-type]


def compiled_zeros(size: int, dtype: str) -> Any:
    """Make an array of zeros to pass to a function compiled by numba; see `compiled_array`.

    Args:
        size: number of elements.
        dtype: numpy's name of the dtype, such as "i8".
    """
    return compiled_array(np.zeros(size, dtype))


def compiled_ints(values: Any) -> Any:
    """Copy a sequence of integers to an int64 array, to pass to a function compiled by numba; see `compiled_array`."""
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
    """Hash an unsigned 64-bit integer to another: the finaliser of the random generator splitmix64."""
    value = ((value ^ (value >> S30)) * MIX_1) & MASK
    value = ((value ^ (value >> S27)) * MIX_2) & MASK
    return value ^ (value >> S31)


@jit
def log(value):
    """Natural logarithm of a positive double, to about 1e-10, with the same bits on every processor."""
    mantissa, exponent = math.frexp(value)
    if mantissa < ROOT_HALF:
        mantissa, exponent = mantissa * 2, exponent - 1
    s = (mantissa - 1) / (mantissa + 1)
    z = s * s
    return 2 * s * (1 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11)))))) + exponent * LN_2


@jit
def exp(value):
    """Exponential of a double <= 0, to about 1e-9, with the same bits on every processor.

    It uses no division, which would be slow, as a step calls it thousands of times.
    """
    if value < -700.0:
        return 0.0
    power = math.floor(value * LOG2_E + 0.5)
    r = value - power * LN_2
    series = C_5 + r * (C_6 + r * (C_7 + r * C_8))
    return (1 + r * (1 + r * (0.5 + r * (C_3 + r * (C_4 + r * series))))) * HALVINGS[-I64(power)]
