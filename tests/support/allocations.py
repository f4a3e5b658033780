"""What allocates tensors, and a device that is full at one of these places."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lp

FOLDER = str(Path(lp.__file__).parent)
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."  # how torch's begins


class Allocations(TorchDispatchMode):
    """Counts operations of this thread that give a new tensor, and may let one fail.

    Args:
        full_at: number of the operation for which there is no memory; None: all succeed.

    Attributes:
        count: operations so far.
        sites: by file and line of `lp` and the operation, the number of the first one there.
    """

    def __init__(self, full_at: int | None = None) -> None:
        super().__init__()
        self.full_at = full_at
        self.count = 0
        self.sites: dict[tuple[str, int, str], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(result.alias_info is None for result in func._schema.returns):
            number = self.count
            self.count += 1
            if number == self.full_at:
                raise torch.OutOfMemoryError(MESSAGE)
            if self.full_at is None:
                self.sites.setdefault(_site(str(func)), number)
        return func(*args, **(kwargs or {}))


def _site(operation: str) -> tuple[str, int, str]:
    frame: Any = sys._getframe(2)
    while frame and not frame.f_code.co_filename.startswith(FOLDER):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno, operation) if frame else ("", 0, operation)
