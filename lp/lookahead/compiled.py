"""Compiled functions: numba compiles them where it is installed; elsewhere the same code runs as Python, slower."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

try:
    import numba

    COMPILED = not numba.config.DISABLE_JIT
except ImportError:
    COMPILED = False


def _compiled(function: Any) -> Any:
    """Compiled at the first call and kept on disk, in a folder for these very sources.

    numba alone would look at the function's own file, and go on with what it once made of the files that it calls.
    """
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(_folder())
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder that may be written to
        return numba.njit(nogil=True)(function)
    finally:
        numba.config.CACHE_DIR = before


def _folder() -> Path:
    here = Path(__file__).parent
    sources = [path.read_bytes() for path in sorted(here.glob("*.py"))]
    digest = hashlib.blake2b(b"".join(source for source in sources if b"jit" in source), digest_size=8).hexdigest()
    return Path(numba.config.CACHE_DIR or here / "__pycache__") / f"compiled-{digest}"


jit: Any
U64: Any  # unsigned 64-bit arithmetic: wrap it with & MASK, which Python's ints need
I64: Any
if COMPILED:
    jit, U64, I64 = _compiled, np.uint64, np.int64
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
