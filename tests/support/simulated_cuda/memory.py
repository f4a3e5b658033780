"""Memory of the simulation: blocks of device memory, pinned host memory, and what lies where nothing was written."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch


class Block:
    """An allocation on a device; lives as long as a CudaTensor that lies in it.

    A graph holds the memory itself, so that it can tell an allocation that Python has dropped from one that it has not.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin  # the line that allocated it


blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()  # by the address of the storage
_pinned: dict[int, torch.Tensor] = {}  # by the address of the storage; kept, or another might get the address


def address(tensor: torch.Tensor) -> int:
    """A number that tells a host tensor's storage from others: all its views have the same."""
    return tensor.untyped_storage()._cdata


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Note that a host tensor's memory is pinned."""
    _pinned[address(tensor)] = tensor
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return address(tensor) in _pinned


def forget_pinned() -> None:
    _pinned.clear()


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a host tensor with what nobody should read: NaN, or a number that no index and no token is."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max // 3)
