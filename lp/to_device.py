"""Copies numbers from the host to a GPU without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def to_device(values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy numbers to a tensor on a device; the host does not wait for a GPU to finish earlier work.

    The numbers are copied from pinned memory: the driver would copy other memory twice, and make the host wait.

    Args:
        values: integers as a list or a list of equally long lists, or a numpy array.
        device: device of the tensor.

    Returns:
        A tensor of the values' shape, int64 for lists, else of the array's dtype.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
