"""Copies between pinned host memory and the device: the host goes on, and they are over when it has waited.

The host must not change what is still to be copied, nor read what is still to come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from tests.support.simulated_cuda.events import line_of_lp
from tests.support.simulated_cuda.memory import poison


class Copies:
    """The copies of one device that the host has not waited for, oldest first, to find hosts that read too early."""

    def __init__(self) -> None:
        self._pending: list[_Copy] = []
        self._finished = 0

    @property
    def count(self) -> int:
        """Number of copies that were ever asked for: an event records it, to know which are over when it is."""
        return self._finished + len(self._pending)

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from pinned memory, now; the source must stay as it is until the host has waited for the copy."""
        target.copy_(source)
        self._pending.append(_ToDevice(source))

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy into pinned memory, whose content has no meaning until the host has waited for the copy."""
        self._pending.append(_ToHost(target, source))

    def finish(self, count: int | None = None) -> None:
        """The host has waited for the first `count` copies, or for all.

        Raises:
            RuntimeError: the host has changed the source of one meanwhile.
        """
        with torch._C._InferenceMode(True):  # which may write to any tensor
            while self._pending and (count is None or self._finished < count):
                self._finished += 1
                self._pending.pop(0).finish()


class _Copy(ABC):
    def __init__(self) -> None:
        self.line = line_of_lp()

    @abstractmethod
    def finish(self) -> None: ...


class _ToDevice(_Copy):
    def __init__(self, source: torch.Tensor) -> None:
        super().__init__()
        self.source = source
        self.copied = source.clone()

    def finish(self) -> None:
        both_nan = self.source.isnan() & self.copied.isnan()
        if not bool(((self.source == self.copied) | both_nan).all()):
            raise RuntimeError(f"pinned memory was changed before the copy from it, at {self.line}, was waited for")


class _ToHost(_Copy):
    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().__init__()
        self.target = target
        self.value = source.clone()
        poison(target)

    def finish(self) -> None:
        self.target.copy_(self.value)
