"""Choose the Triton kernels that replace torch's small operations in captured steps, by a trial on this device.

A kernel is chosen if it gives the same numbers as torch, but for rounding, and is faster. Each kernel is tried by
itself; tests/gpu checks whole steps that call them.

T: step tokens, E: hidden size, H: query heads, G: KV heads, D: head dimension, F: intermediate size.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import median

import torch
from torch.nn import functional as F

from lp.models.architectures import NormRule
from lp.models.graph_recorder import GraphRecorder
from lp.models.layer_operations import Norm, rotate
from lp.optional import is_installed
from lp.parallel.replica import Replica
from lp.waits import waiting

logger = logging.getLogger(__name__)

TRIAL_TOKENS = (1, 64)
TRIAL_SLOTS = 256
TRIAL_LAYERS = 8
TRIAL_MOVES = 64  # that a captured step has room for; most move nothing
COPIES = 20  # of an operation in one graph
ROUNDS = 5
FASTER = 0.95  # of torch's time, at most: what is nearer is noise, and the choice would differ from run to run
# The largest difference, in eps of the dtype over a row's root mean square: a rounding that falls the other way is one
# eps of a value, which may be some times that size. In float32 it is the order of the sums, too.
TOLERANCE = {torch.bfloat16: 8.0, torch.float16: 8.0, torch.float32: 64.0}


@dataclass(frozen=True)
class LayerShape:
    """Sizes, dtype and device of a model's layers, for which kernels are tried; equal models share one trial.

    Attributes:
        hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size: E, H, G, D, F; `num_heads` counts query
            heads.
        norm: where RMS norms round to the model's dtype.
        dtype, device: dtype of the weights, and the device that they lie on.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm: NormRule
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class LayerKernels:
    """The kernels that a model's captured steps run instead of torch's operations.

    Each field is the function of that name in `lp.models.layer_kernels`; None: steps run torch's operation.
    """

    normalize: Callable[..., torch.Tensor] | None = None
    rotate_and_store: Callable[..., torch.Tensor] | None = None
    silu_times: Callable[..., torch.Tensor] | None = None
    move_slots: Callable[..., None] | None = None


NO_KERNELS = LayerKernels()
NAMES = tuple(field.name for field in fields(LayerKernels))
_LOCK = threading.Lock()  # trials at the same time would time each other
_passed: dict[LayerShape, frozenset[str]] = {}  # by trials that came to their end
Operation = Callable[[], list[torch.Tensor]]  # returns what it computes, and what it writes to


def choose_kernels(shape: LayerShape, replica: Replica) -> LayerKernels:
    """Choose the kernels that pass their trial on this device: right results, in less time than torch takes.

    Ranks that divide a model choose the same kernels. Without a GPU or Triton no kernel is chosen.

    Args:
        shape: sizes, dtype and device of the model's layers.
        replica: the ranks that the model is divided among.
    """
    if shape.device.type != "cuda" or shape.dtype not in TOLERANCE or not is_installed("triton"):
        return NO_KERNELS
    with waiting("trying the kernels of a layer on this device"):
        passed = _passing(shape)  # raises nothing: the other ranks wait for the vote
    if replica.size > 1:
        votes = torch.tensor([name in passed for name in NAMES], dtype=torch.int64).to(shape.device)
        agreed = (replica.on_host(replica.all_reduce(votes)) == replica.size).tolist()
        passed = frozenset(name for name, by_all in zip(NAMES, agreed, strict=True) if by_all)
    if not passed:
        return NO_KERNELS
    from lp.models import layer_kernels  # here: it needs Triton

    return LayerKernels(**{name: getattr(layer_kernels, name) for name in passed})


def _passing(shape: LayerShape) -> frozenset[str]:
    """Names of the kernels that agree with torch and take less time, summed over the numbers of tokens that are tried.

    A trial that raises an error is repeated by the next model: memory may have been short, or another thread capturing.
    """
    with _LOCK:
        if shape in _passed:
            return _passed[shape]
        passed = set()
        complete = True
        for name in NAMES:
            try:
                with torch.inference_mode(), torch.cuda.device(shape.device):
                    error, torch_s, kernel_s = _trial(name, shape)
            except Exception as failure:  # a compiler or memory that is missing, or a size that it does not take
                reason = str(failure).strip().partition("\n")[0]
                logger.warning("layers run without the kernel %s: %s: %s", name, type(failure).__name__, reason)
                complete = False
                continue
            if error > TOLERANCE[shape.dtype]:
                logger.warning("layers run without the kernel %s: its results are off by %.2g eps", name, error)
                continue
            logger.info("kernel %s takes %.1f us, torch %.1f us", name, 1e6 * kernel_s, 1e6 * torch_s)
            if kernel_s < FASTER * torch_s:
                passed.add(name)
        if complete:
            _passed[shape] = frozenset(passed)
        return frozenset(passed)


def _trial(name: str, shape: LayerShape) -> tuple[float, float, float]:
    """Compare a kernel with torch: largest difference in eps of the dtype, seconds of torch, seconds of the kernel."""
    error = torch_s = kernel_s = 0.0
    for num_tokens in TRIAL_TOKENS:
        by_torch, by_kernel = _TRIALS[name](shape, num_tokens)
        for out, expected in zip(by_kernel(), by_torch(), strict=True):
            error = max(error, _difference(out, expected))
        torch_s += _seconds(by_torch)
        kernel_s += _seconds(by_kernel)
    return error, torch_s, kernel_s


def _difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference in eps of the dtype, relative to the root mean square of its row; infinite for a NaN."""
    size = expected.double().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    difference = ((out.double() - expected.double()).abs() / size).nan_to_num(nan=math.inf)
    return float(difference.max()) / torch.finfo(out.dtype).eps


def _seconds(operation: Operation) -> float:
    """How long an operation takes on the device, without the host's part in starting it: the median of replays."""

    def copies() -> None:
        for _ in range(COPIES):
            operation()

    device = torch.empty(0, device="cuda").device  # the current one
    replay = GraphRecorder(device, recording=True).record(copies)
    found: list[float] = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / COPIES)
    return median(found)


def _drawn(shape: LayerShape, *sizes: int) -> torch.Tensor:
    """Numbers of the model's dtype, the same in every process."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(shape.device, shape.dtype)


def _norms(shape: LayerShape, num_tokens: int) -> tuple[Operation, Operation]:
    from lp.models.layer_kernels import normalize

    x_TE, weight_E = _drawn(shape, num_tokens, shape.hidden_size), _drawn(shape, shape.hidden_size)
    by_torch = Norm(weight_E, 1e-5, shape.norm)
    rules = shape.norm is NormRule.ROUNDED, shape.norm is NormRule.OFFSET
    return lambda: [by_torch(x_TE)], lambda: [normalize(x_TE, weight_E, 1e-5, *rules)]


def _rotations(shape: LayerShape, num_tokens: int) -> tuple[Operation, Operation]:
    from lp.models.layer_kernels import rotate_and_store

    num_heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    states = _drawn(shape, num_tokens, num_heads + 2 * kv_heads, dim)
    rotated, values = states[:, :-kv_heads], states[:, -kv_heads:]
    cos, sin = _drawn(shape, num_tokens, 1, dim).cos(), _drawn(shape, num_tokens, 1, dim).sin()
    slots_T = torch.arange(7, 7 + num_tokens).to(shape.device)
    k, v, own_k, own_v = torch.zeros((4, 1, kv_heads, TRIAL_SLOTS, dim), dtype=shape.dtype, device=shape.device)

    def by_torch() -> list[torch.Tensor]:
        turned = rotate(rotated, cos, sin)
        k.index_copy_(2, slots_T, turned[:, num_heads:].transpose(0, 1)[None])
        v.index_copy_(2, slots_T, values.transpose(0, 1)[None])
        return [turned[:, :num_heads], k, v]

    return by_torch, lambda: [rotate_and_store(rotated, values, cos, sin, own_k, own_v, slots_T), own_k, own_v]


def _activations(shape: LayerShape, num_tokens: int) -> tuple[Operation, Operation]:
    from lp.models.layer_kernels import silu_times

    gate, up = _drawn(shape, num_tokens, 2 * shape.intermediate_size).chunk(2, -1)
    return lambda: [F.silu(gate).mul_(up)], lambda: [silu_times(gate, up)]


def _moves(shape: LayerShape, num_tokens: int) -> tuple[Operation, Operation]:
    from lp.models.layer_kernels import move_slots

    buffer = _drawn(shape, TRIAL_LAYERS, shape.num_kv_heads, TRIAL_SLOTS, shape.head_dim)
    own = buffer.clone()
    moved = min(num_tokens, 4)
    unmoved = [TRIAL_SLOTS - 1] * (TRIAL_MOVES - moved)
    sources_M = torch.tensor([*range(40, 40 + 3 * moved, 3), *unmoved]).to(shape.device)
    targets_M = torch.tensor([*range(30, 30 + moved), *unmoved]).to(shape.device)

    def by_torch() -> list[torch.Tensor]:
        return [buffer.index_copy_(2, targets_M, buffer.index_select(2, sources_M))]

    def by_kernel() -> list[torch.Tensor]:
        move_slots(own, sources_M, targets_M)
        return [own]

    return by_torch, by_kernel


_TRIALS: dict[str, Callable[[LayerShape, int], tuple[Operation, Operation]]] = {
    "normalize": _norms,
    "rotate_and_store": _rotations,
    "silu_times": _activations,
    "move_slots": _moves,
}
