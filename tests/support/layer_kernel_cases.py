"""Cases of a layer's kernels against torch's operations; as a program, in Triton's interpreter on a CPU.

T: tokens, E: hidden size, H: query heads, G: KV heads, D: head dimension, C: cache slots, F: intermediate size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch
from torch.nn import functional as F

from lp.models.architectures import NormRule
from lp.models.kv_cache import StatesKind, StaticKVCache
from lp.models.layer_operations import Norm, rotate

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _drawn(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def worst_difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, in eps of the dtype over the largest value nearby: the size of what rounding may change."""
    assert out.shape == expected.shape and out.dtype == expected.dtype and out.isfinite().all()
    size = expected.double().abs().clamp(min=float(expected.double().abs().mean()))
    return float(((out.double() - expected.double()).abs() / size).max() / torch.finfo(out.dtype).eps)


def norm_error(device: torch.device, dtype: torch.dtype) -> float:
    """Tries all rules, sizes that are no power of 2, and rows with a gap between them."""
    from lp.models.layer_kernels import normalize  # here: the environment says whether it is interpreted

    errors = []
    for rule in NormRule:
        for num_tokens, size in ((1, 64), (5, 100), (3, 576)):
            x_TE = 3 * _drawn(device, dtype, num_tokens, size + 8)[:, :size]
            weight = _drawn(device, dtype, size)
            out = normalize(x_TE, weight, 1e-5, rule is NormRule.ROUNDED, rule is NormRule.OFFSET)
            errors.append(worst_difference(out, Norm(weight, 1e-5, rule)(x_TE)))
    return max(errors)


def rotation_error(device: torch.device, dtype: torch.dtype) -> float:
    """Compares queries and the cache, for head dimensions that are no power of 2, and slots in any order."""
    from lp.models.layer_kernels import rotate_and_store

    errors = []
    for num_heads, kv_heads, dim, num_tokens in ((4, 4, 16, 1), (6, 2, 80, 5), (9, 3, 64, 3), (14, 2, 96, 2)):
        states = _drawn(device, dtype, num_tokens, num_heads + 2 * kv_heads, dim)
        angles = _drawn(device, torch.float32, num_tokens, 1, dim // 2)
        cos = torch.cat([angles.cos()] * 2, -1).to(dtype)
        sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
        slots = torch.tensor([11, 3, 4, 5, 0], device=device)[:num_tokens]
        rotated = rotate(states[:, :-kv_heads], cos, sin)
        caches = []
        for _ in range(2):
            cache = StaticKVCache(1, 12, zeroed=True, known={StatesKind(kv_heads, dim, dtype, device): 2})
            cache.allocate()
            keys = torch.zeros(1, kv_heads, 1, dim, dtype=dtype, device=device)
            cache.update(keys, keys, 0)
            caches.append(cache)
        values = states[:, -kv_heads:]
        with caches[0].writing_to(slots):
            caches[0].update(rotated[:, num_heads:].transpose(0, 1)[None], values.transpose(0, 1)[None], 0)
        q = rotate_and_store(states[:, :-kv_heads], values, cos, sin, *caches[1].whole(0), slots)
        errors.append(worst_difference(q, rotated[:, :num_heads]))
        errors += [
            worst_difference(own, theirs) for own, theirs in zip(caches[1].whole(0), caches[0].whole(0), strict=True)
        ]
    return max(errors)


def activation_error(device: torch.device, dtype: torch.dtype) -> float:
    """Tries both parts of one product, and two products."""
    from lp.models.layer_kernels import silu_times

    errors = []
    for num_tokens, size in ((1, 64), (3, 1500)):
        both = 3 * _drawn(device, dtype, num_tokens, 2 * size)
        for gate, up in (both.chunk(2, -1), (both[:, :size].contiguous(), both[:, size:].contiguous())):
            errors.append(worst_difference(silu_times(gate, up), F.silu(gate) * up))
    return max(errors)


def moves_error(device: torch.device, dtype: torch.dtype) -> float:
    """1 where some slot of some layer is not what a gather and a scatter leave."""
    from lp.models.layer_kernels import move_slots

    wrong = 0
    for sources, targets in (([], []), ([7], [4]), ([5, 6, 9, 12], [4, 5, 6, 7]), ([8, 30, 31], [2, 24, 25])):
        buffer = _drawn(device, dtype, 4, 3, 40, 24)
        expected = buffer.clone()
        expected[:, :, targets] = buffer[:, :, sources]
        padding = [39] * (8 - len(sources))
        move_slots(buffer, *(torch.tensor([*slots, *padding], device=device) for slots in (sources, targets)))
        wrong += not torch.equal(buffer, expected)
    return float(wrong)


CASES: dict[str, Callable[[torch.device, torch.dtype], float]] = {
    "norm": norm_error,
    "rotation": rotation_error,
    "activation": activation_error,
    "moves": moves_error,
}


def main() -> None:
    """Prints the error of every case and dtype as JSON."""
    torch.set_num_threads(1)
    assert os.environ.get("TRITON_INTERPRET") == "1", "compiled kernels need a GPU"
    device = torch.device("cpu")
    print(json.dumps({f"{name} {dtype}": case(device, dtype) for name, case in CASES.items() for dtype in DTYPES}))


if __name__ == "__main__":
    main()
