"""A faster all-reduce of small tensors for tensor parallelism: one kernel reads the tensors of all ranks.

NCCL's ring takes 2 (T - 1) hops, each with the latency of a link: most of its time if a step has few tokens. The kernel
is torch's (`torch.distributed._symmetric_memory`, alpha in 2.13); it adds in the order of ranks, so that all ranks get
the same bits. It needs GPUs that can read each other's memory. T: ranks that hold one copy of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 19  # of a tensor; every rank reads T of them, and a ring reads less of a larger one
ALIGNMENT = 16  # bytes
DTYPES = (torch.bfloat16, torch.float32)  # that the kernel adds

Kernel = Callable[[torch.Tensor, torch.Tensor, str, str], torch.Tensor]  # shared memory, tensor, "sum", group


class OneShotSum:
    """Sums tensors of up to 512 KiB over the ranks that hold one copy of the model: call it with this rank's tensor.

    Args:
        shared: uint8 (MOST_BYTES,), memory of this rank that every rank of the group can read.
        group: name of the process group.
        kernel: copies a tensor to `shared`, and returns the sum of all ranks' tensors in new memory.
    """

    def __init__(self, shared: torch.Tensor, group: str, kernel: Kernel) -> None:
        self._shared = shared
        self._group = group
        self._kernel = kernel

    def agrees_with(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Test whether this object's sums agree with torch.distributed's within rounding.

        All ranks of the group call it together.

        Args:
            group: the process group to compare with.
            device: device of this rank's tensors.
        """
        generator = torch.Generator(device).manual_seed(dist.get_rank(group))
        same = True  # all are tried, as the other ranks wait for each
        for dtype in DTYPES:
            for nbytes in (ALIGNMENT, 3 * ALIGNMENT, MOST_BYTES):
                tensor = torch.randn(nbytes // dtype.itemsize, generator=generator, device=device).to(dtype)
                ours = self(tensor)
                sizes = tensor.abs()
                dist.all_reduce(tensor, group=group)
                dist.all_reduce(sizes, group=group)
                # Both add T numbers, in orders of their own, and round after each to the dtype.
                limit = torch.finfo(dtype).eps * dist.get_world_size(group) * sizes.float()
                same &= bool(((ours.float() - tensor.float()).abs() <= limit).all())
        return same

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a size and dtype that can be summed here; equal on all ranks, as tensors are alike."""
        nbytes = tensor.numel() * tensor.element_size()
        return 0 < nbytes <= MOST_BYTES and nbytes % ALIGNMENT == 0 and tensor.dtype in DTYPES

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, into new memory; it must be one that `takes` accepts."""
        return self._kernel(self._shared.view(tensor.dtype), tensor.contiguous(), "sum", self._group).view_as(tensor)


def by_symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> OneShotSum:
    """Make a OneShotSum that uses torch's kernel over symmetric memory; all ranks of the group call it together.

    Args:
        group: the ranks that hold one copy of the model between them.
        device: device of this rank's tensors.

    Raises:
        RuntimeError: the device is no GPU, or torch can't share memory in this group.
    """
    if device.type != "cuda":
        raise RuntimeError(f"the device is {device.type}, not cuda")
    from torch.distributed import _symmetric_memory as symmetric_memory

    shared: Any = symmetric_memory.empty(MOST_BYTES, dtype=torch.uint8, device=device)
    symmetric_memory.rendezvous(shared, group)
    return OneShotSum(shared, group.group_name, torch.ops.symm_mem.one_shot_all_reduce_copy)


def one_shot_sum(
    group: dist.ProcessGroup,
    device: torch.device,
    make: Callable[[dist.ProcessGroup, torch.device], OneShotSum] = by_symmetric_memory,
) -> OneShotSum | None:
    """Make a OneShotSum, and check its sums against torch.distributed's; all ranks of the group call it together.

    Args:
        group: the ranks that hold one copy of the model between them.
        device: device of this rank's tensors.
        make: function that makes the OneShotSum to check.

    Returns:
        The OneShotSum; None on all ranks if one of them can't make it or gets other sums than torch.distributed's,
        which the log then says.
    """
    failure = "another rank of the replica cannot"

    def on_all(found: OneShotSum | None) -> OneShotSum | None:
        count = torch.tensor([float(found is not None)], device=device)
        dist.all_reduce(count, dist.ReduceOp.MIN, group)
        return found if count.item() else None

    found: OneShotSum | None = None
    try:
        found = make(group, device)
    except Exception as error:  # of an alpha interface: whatever it is, torch.distributed sums without it
        failure = str(error)
    found = on_all(found)
    if found and not found.agrees_with(group, device):
        failure, found = "its sums are not those of torch.distributed", None
    found = on_all(found)
    if found is None:
        logger.warning("one_shot_sums is on, but torch.distributed sums: %s", failure)
    return found
