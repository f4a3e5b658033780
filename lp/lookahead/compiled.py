"""Compiled functions: numba compiles them where it is installed; elsewhere the same code runs as Python, slower."""

from __future__ import annotations

from typing import Any

import numpy as np

try:
    import numba

    COMPILED = not numba.config.DISABLE_JIT
except ImportError:
    COMPILED = False

jit: Any
U64: Any  # unsigned 64-bit arithmetic: wrap it with & MASK, which Python's ints need
I64: Any
if COMPILED:
    jit, U64, I64 = numba.njit(cache=True, nogil=True), np.uint64, np.int64
else:
    jit, U64, I64 = (lambda function: function), int, int


def given(array: np.ndarray) -> Any:
    """An array as compiled functions take it; Python indexes a memoryview far faster."""
    return array if COMPILED else memoryview(np.ascontiguousarray(array))  # type: ignore[arg-type]


def zeros(size: int, dtype: str) -> Any:
    """An array of zeros as compiled functions take it."""
    return given(np.zeros(size, dtype))


def ints(values: Any) -> Any:
    """Whole numbers as compiled functions take them."""
    return given(np.array(values, np.int64))
