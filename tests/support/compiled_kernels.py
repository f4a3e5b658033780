"""Compiles Triton kernels for GPUs that are not there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

from lp.kernel_launch import LAUNCH

SHARED_KB = {80: 163, 90: 227, 100: 227}  # of a program at most, by compute capability


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    dtype: str,
    capability: int,
    options: dict[str, int],
) -> Any:
    """Compile a Triton kernel for a GPU that need not be there; pointers and strides are aligned, as caches are.

    Args:
        constants: values of its constant parameters.
        types: Triton's types of parameters that differ from the default: `*dtype` for names in "_base", else int32.
        dtype: Triton's name of the elements that pointers point to, such as "bf16".
        capability: compute capability of the GPU; 90 is an H100.
        options: how it is launched, such as num_warps.
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
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={**LAUNCH, **options})


def spilled_bytes(kernel: Any, capability: int) -> int:
    """What a compiled kernel keeps in slow memory because registers do not suffice, as ptxas says."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = kernel.asm["ptx"]
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills, said
    return sum(int(stores) for stores, _ in spills)
