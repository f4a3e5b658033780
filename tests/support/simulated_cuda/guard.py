"""Lets a torch without CUDA handle tensors whose device is "cuda": its C++ code asks for CUDA's device guard.

A device guard switches the current device. That of the meta device does nothing, which is right here, so CUDA's empty
slot of torch's registry holds it for the time of a simulation. No compiler is needed, and nothing stays behind. Asked
for the current device, where someone said "cuda" without an index, it says "meta": the simulation knows what is meant.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry, pointers by DeviceType
_CUDA, _META = 1, 14  # c10::DeviceType
_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"


def why_not() -> str | None:
    """Why no guard can be lent here; None: it can."""
    if torch.version.cuda or torch.version.hip:
        return "this torch has a CUDA of its own"
    try:
        slots = _slots()
    except (OSError, ValueError) as error:
        return f"torch's registry of device guards is not where it was ({error})"
    return None if slots[_META] else "torch has no device guard of the meta device"


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """CUDA has the meta device's guard within the block."""
    slots = _slots()
    before = slots[_CUDA]
    slots[_CUDA] = slots[_META]
    try:
        yield
    finally:
        slots[_CUDA] = before


def _slots() -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * (_META + 1)).in_dll(ctypes.CDLL(str(_LIBRARY)), _REGISTRY)
