"""Find operations that make the host wait for the device, before work is captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# By an index tensor: a mask is turned into numbers first, and the host waits for how many there are; one on the host is
# copied.
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# With a number from the device, which the host reads.
FILLS = {"masked_fill", "masked_fill_", "index_fill", "index_fill_"}


class NoWaiting(TorchDispatchMode):
    """Context manager in which an operation that makes this thread wait for a GPU raises an error.

    It finds such operations before work is captured as a CUDA graph, which cannot contain them. Torch has such a mode
    (`torch.cuda.set_sync_debug_mode`), but for the whole process. Another thread that may well wait for its GPU would
    fail too, and torch would show a warning.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # one that takes functions
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # inference mode hands over whole what is composed of other operations
                return func.decompose(*args, **kwargs)
        if _waits(func, args, kwargs):
            raise RuntimeError(f"called a synchronizing CUDA operation ({func})")
        return func(*args, **kwargs)


def _waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the device in this operation."""
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    on_cuda = any(tensor.is_cuda for tensor in tensors)
    name = func._schema.name.partition("::")[2]
    if name in ("_to_copy", "copy_"):
        target = kwargs.get("device") or args[0].device
        other = args[0].device if name == "_to_copy" else args[1].device
        non_blocking = kwargs.get("non_blocking") or args[2:] == (True,)
        return {target.type, other.type} == {"cuda", "cpu"} and not non_blocking
    if not on_cuda:
        return False
    if name in INDEXES:
        indices = [index for index in args[1] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        puts = name not in ("index", "_unsafe_index")
        fills = puts and len(indices) == 1 and args[2].numel() == 1 and args[2].is_cpu
        return (bool(masks) and not fills) or not all(index.is_cuda for index in indices)
    if name in FILLS:
        value = kwargs.get("value", args[-1])
        return isinstance(value, torch.Tensor) and value.is_cuda
    if name == "lift_fresh":  # numbers of a list have been copied to the device
        return True
    sized = kwargs.get("output_size") is not None  # it need not be looked up
    return torch.Tag.data_dependent_output in func.tags or (torch.Tag.dynamic_output_shape in func.tags and not sized)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
