"""Copies to a GPU that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def to_device(values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray, device: torch.device) -> torch.Tensor:
    """Numbers as a tensor on a device: int64, or of the array's dtype.

    From memory that is not pinned the driver would copy twice, and the host would wait until the device gets there.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
