"""Compiles Triton kernels for GPUs that are not there."""

from __future__ import annotations

from typing import Any

SHARED_KB = {80: 163, 90: 227}  # of a program at most, by compute capability


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    dtype: str,
    capability: int,
    options: dict[str, int],
) -> Any:
    """A Triton kernel, compiled for a GPU that need not be there; pointers and strides are aligned, as caches are.

    Args:
        constants: values of its constant parameters.
        types: of other parameters; pointers, whose names end in "_base", are to `dtype` otherwise, the rest int32.
        capability: of the GPU, 90 for an H100.
        options: such as num_warps.
    """
    import triton  # here: not every machine that runs tests has it
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {}
    for name in names:
        default = f"*{dtype}" if name.endswith("_base") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, default)
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (at,): aligned for at, name in enumerate(names) if name.endswith("_base") or name.startswith("stride_")
    }
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
