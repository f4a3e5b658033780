"""What the simulation knows of an operation of torch, from its schema and its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tests.support.simulated_cuda.by_position import by_position
from tests.support.simulated_cuda.flash import flash_attention_forward, tree_attention
from tests.support.simulated_cuda.layer_kernels import move_slots, normalize, rotate_and_store, silu_times

# One kernel on a GPU, though torch composes it of others.
WHOLE = {"scaled_dot_product_attention"}
# Kernels that no CPU has.
KERNELS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_attention_forward,
    "tree_attention": tree_attention,
    "by_position": by_position,
    "normalize": normalize,
    "rotate_and_store": rotate_and_store,
    "silu_times": silu_times,
    "move_slots": move_slots,
}
# Allocations: what lies in the memory is whatever was there.
ALLOCATES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# Their result's size, or what they return, is a matter of values: the host waits for them.
WAITS = {
    "_local_scalar_dense", "_unique", "_unique2", "allclose", "bincount", "equal", "is_nonzero", "masked_select",
    "nonzero", "unique_consecutive", "unique_dim",
}  # fmt: skip
# Likewise, unless they are told the size.
WAITS_FOR_SIZE = {"repeat_interleave": "output_size"}
# By an index tensor, which may be on the host.
INDEXES = {"_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "index", "index_put", "index_put_"}
# The host reads the number that they fill with, also where it is on the device.
FILLS = {"index_fill", "index_fill_", "masked_fill", "masked_fill_"}
# Not pointwise, but they take a CPU tensor without dimensions all the same.
TAKE_SCALARS = {"fill_", *FILLS}
_NO_KERNEL = {*ALLOCATES, "_local_scalar_dense", "_unsafe_view", "detach_"}


@dataclass(frozen=True)
class Operator:
    """One overload.

    Attributes:
        name: without namespace and overload.
        composite: torch composes it of others.
        view: its results are views of its first tensor.
        written: index and name of the arguments that it writes to.
        takes_scalars: it takes a CPU tensor without dimensions beside CUDA tensors.
        launches: it starts a kernel.
        fresh: what it returns is memory of its own, and not what it writes to.
    """

    name: str
    composite: bool
    view: bool
    written: tuple[tuple[int, str], ...]
    takes_scalars: bool
    launches: bool
    fresh: bool

    def targets(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call that it writes to."""
        given = (args[at] if at < len(args) else kwargs.get(name) for at, name in self.written)
        return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]


@cache
def operator(func: Any) -> Operator:
    """What is known of an overload."""
    name = func._schema.name.split("::")[-1]
    written = tuple(
        (at, argument.name)
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    view = not written and any(returned.alias_info is not None for returned in func._schema.returns)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return Operator(
        name=name,
        composite=name not in WHOLE and has_kernel(func.name(), "CompositeImplicitAutograd"),
        view=view or name == "_unsafe_view",
        written=written,
        takes_scalars=torch.Tag.pointwise in func.tags or name in TAKE_SCALARS,
        launches=not view and name not in _NO_KERNEL,
        fresh=any(returned.alias_info is None for returned in func._schema.returns),
    )
