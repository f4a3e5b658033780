"""Attention of a tree-shaped step on CUDA, by the fastest of three kernels that passes a trial.

- triton: `lp.attention.tree_kernel`, if Triton is installed: all keys in one pass, divided among programs.
- paged: torch's FlashAttention for the cached keys, plain products for the step's own keys, and a merge of both. It
  gets a table of the cache's pages, since FlashAttention then divides the keys among programs; otherwise 64 queries
  keep only 32 of 132 SMs busy.
- varlen: like paged, but without pages, for versions of torch that divide keys wrongly or not at all.

In the trial, at first use, a kernel's results on random tensors on this device are compared with plain products.

H: query heads, G: KV heads, D: head dimension, T: step tokens, L: cached tokens, C: cache slots, N: keys (L + T or C).
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lp.attention.merging import masked_attention, merge
from lp.errors import UserError
from lp.optional import is_installed

logger = logging.getLogger(__name__)

HALVES = (torch.float16, torch.bfloat16)
TRITON = is_installed("triton")
DTYPES = (*HALVES, torch.float32) if TRITON else HALVES  # dtypes that some kernel here takes
PAGE = 256  # cache slots, the unit of FlashAttention's block tables
TRIAL_CAPACITY = 5 * PAGE
TRIAL_LENGTHS = (0, 300, 1000)
TRIAL_TOKENS = (1, 17, 64)  # numbers of step tokens for which kernels use blocks of different sizes
SEQUENCE_TOKENS = 17  # step tokens in the trial with several sequences
# Largest error of a token that passes the trial, relative to its size: 4 eps. A right kernel makes about half of that,
# as it rounds probabilities and results. In float32 the error is that of the order of sums, over at most so many keys.
# A token that sees one key too many, or too few, is off by 0.1.
TRIAL_TOLERANCE = {dtype: 4 * torch.finfo(dtype).eps for dtype in HALVES}
TRIAL_TOLERANCE[torch.float32] = (max(TRIAL_LENGTHS) + max(TRIAL_TOKENS)) * torch.finfo(torch.float32).eps
TRIAL_SEQUENCES = ((0, 11, 500, 300), (11, 6, 20, 37))  # see `sequences_Q4`
Kernel = Callable[..., torch.Tensor]  # takes queries, keys, values, mask, scale, slot_mapping_T and sinks_H


class Shape(NamedTuple):
    """Device, dtype and head sizes of a model's attention; each kernel is tried once for each such shape."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    has_sinks: bool


def step_attention_on_cuda(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GND: torch.Tensor,
    mask_11TT: torch.Tensor,
    scale: float | None,
    slot_mapping_T: torch.Tensor | None,
    sequences_Q4: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention in a tree-shaped step on a GPU; arguments and result are those of `flash.step_attention`.

    Raises:
        ValueError: no kernel works on this device.
        RuntimeError: the step has several sequences, and the chosen kernel takes only one, or has failed the trial with
            several.
    """
    _, heads, _, dim = q_1HTD.shape
    _, kv_heads, _, value_dim = v_1GND.shape
    shape = (q_1HTD.device, q_1HTD.dtype, heads, kv_heads, dim, value_dim, sinks_H is not None)
    name = kernel_for(*shape)
    scale = scale or dim**-0.5
    if sequences_Q4 is None:
        return KERNELS[name](q_1HTD, k_1GND, v_1GND, mask_11TT, scale, slot_mapping_T, sinks_H)
    if name != "triton":
        raise RuntimeError(f"attention by {name} takes one sequence a step")
    error = _error_of_sequences(Shape(*shape))
    if not error <= TRIAL_TOLERANCE[q_1HTD.dtype]:
        raise RuntimeError(f"attention by {name} over several sequences is off by {error:.2g}")
    return _triton(q_1HTD, k_1GND, v_1GND, mask_11TT, scale, slot_mapping_T, sinks_H, sequences_Q4)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiled step has the kernel compiled in
def kernel_for(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, value_dim: int, has_sinks: bool
) -> str:
    """Choose the kernel for a model's attention: the first one in KERNELS that passes a trial.

    The trial runs at first use, and its result is remembered. That is before a CUDA graph is recorded, since a step is
    warmed up first.

    Args:
        device, dtype: device and dtype of queries, keys and values.
        heads, kv_heads: number of query heads and of KV heads.
        dim, value_dim: head dimension of queries and keys, and of values.
        has_sinks: whether heads have attention sinks.

    Returns:
        The kernel's name in KERNELS, such as "triton".

    Raises:
        ValueError: no kernel passes; the message has the reason for each.
    """
    return _first_fit(Shape(device, dtype, heads, kv_heads, dim, value_dim, has_sinks))


@functools.cache
def _first_fit(shape: Shape) -> str:
    refused = []
    for name, kernel in KERNELS.items():
        if name == "triton" and not TRITON:
            continue
        try:
            error = _trial_error(kernel, shape)
            if error <= TRIAL_TOLERANCE[shape.dtype]:
                break
            reason = f"its results are off by {error:.2g}"
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # a compiler that is missing, or a head dimension that it takes no more
            reason = (
                f"{type(failure).__name__}: {str(failure).strip().splitlines()[0]}" if str(failure) else repr(failure)
            )
        refused.append(f"{name} ({reason})")
    else:
        raise UserError(
            f"no attention kernel works with head dimension {shape.dim} and {shape.dtype} on {shape.device}: "
            f"{'; '.join(refused)}; choose attention=sdpa"
        )
    if refused:
        logger.warning("attention=flash runs on %s by %s, not by %s", shape.device, name, "; ".join(refused))
    return name


def _trial_error(kernel: Kernel, shape: Shape) -> float:
    """Run a kernel on drawn steps: the largest relative error of a token against plain products in float32."""
    device, dtype, heads, kv_heads, dim, value_dim, _ = shape
    drawn, sinks_H = _drawn(shape)
    errors = []
    for num_tokens, length in itertools.product(TRIAL_TOKENS, TRIAL_LENGTHS):
        q = drawn(1, heads, num_tokens, dim)
        visible_TT = torch.ones(num_tokens, num_tokens).tril().bool()
        visible_TT[-1, 1:9] = False
        visible_TT[-1, -1] = True
        mask_11TT = torch.zeros(visible_TT.shape).masked_fill(~visible_TT, torch.finfo(dtype).min)[None, None]
        mask_11TT = mask_11TT.to(device, dtype)
        end = length + num_tokens
        k = drawn(1, kv_heads, TRIAL_CAPACITY, dim)
        v = drawn(1, kv_heads, TRIAL_CAPACITY, value_dim)
        k[:, :, end:] = 1e3  # what lies behind the step shows in the results, if it is read
        v[:, :, end:] = 1e3
        mask_11TN = torch.nn.functional.pad(mask_11TT, (length, 0)).float()
        parts = q.float(), k[:, :, :end].float(), v[:, :, :end].float()
        expected = masked_attention(*parts, mask_11TN, dim**-0.5, sinks_H)[0]
        slot_mapping_T = torch.arange(length, end, device=device)
        for used_k, used_v, slots in ((k, v, slot_mapping_T), (k[:, :, :end], v[:, :, :end], None)):
            out = kernel(q, used_k, used_v, mask_11TT, dim**-0.5, slots, sinks_H)
            errors.append(((out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    return float(torch.stack(errors).max())


@functools.cache
def _error_of_sequences(shape: Shape) -> float:
    """Largest relative error of a token by the Triton kernel in a step of several sequences in one pool."""
    device, dtype, heads, kv_heads, dim, value_dim, _ = shape
    drawn, sinks_H = _drawn(shape)
    q = drawn(1, heads, SEQUENCE_TOKENS, dim)
    k = drawn(1, kv_heads, TRIAL_CAPACITY, dim)
    v = drawn(1, kv_heads, TRIAL_CAPACITY, value_dim)
    own_slots = [range(slot + length, slot + length + count) for _, count, slot, length in TRIAL_SEQUENCES]
    slot_mapping_T = torch.tensor([*itertools.chain(*own_slots)], device=device)
    visible_TT = torch.block_diag(*(torch.ones(count, count).tril() for _, count, _, _ in TRIAL_SEQUENCES)) != 0
    mask_11TT = torch.zeros(visible_TT.shape).masked_fill(~visible_TT, torch.finfo(dtype).min)[None, None]
    mask_11TT = mask_11TT.to(device, dtype)
    scale = dim**-0.5
    sequences_Q4 = torch.tensor(TRIAL_SEQUENCES, device=device)
    out = _triton(q, k, v, mask_11TT, scale, slot_mapping_T, sinks_H, sequences_Q4).float()
    errors = []
    for first, count, slot, length in TRIAL_SEQUENCES:
        own, keys = slice(first, first + count), slice(slot, slot + length + count)
        mask_11tN = torch.nn.functional.pad(mask_11TT[:, :, own, own], (length, 0)).float()
        parts = q[:, :, own].float(), k[:, :, keys].float(), v[:, :, keys].float()
        expected = masked_attention(*parts, mask_11tN, scale, sinks_H)[0]
        errors.append(((out[:, :, own] - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    return float(torch.stack(errors).max())


def _drawn(shape: Shape) -> tuple[Callable[..., torch.Tensor], torch.Tensor | None]:
    """A function that draws a tensor of given sizes for a trial, and drawn sinks, None if the shape has none."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(shape.device, shape.dtype)

    return drawn, 3 * drawn(shape.heads) if shape.has_sinks else None


def _triton(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GND: torch.Tensor,
    mask_11TT: torch.Tensor,
    scale: float,
    slot_mapping_T: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
    sequences_Q4: torch.Tensor | None = None,
) -> torch.Tensor:
    from lp.attention.tree_kernel import tree_attention  # here: it needs Triton

    out_1HTD: torch.Tensor = tree_attention(
        q_1HTD, k_1GND, v_1GND, mask_11TT[0, 0], slot_mapping_T, scale, sequences_Q4, sinks_H
    )
    return out_1HTD


def _varlen(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GND: torch.Tensor,
    mask_11TT: torch.Tensor,
    scale: float,
    slot_mapping_T: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
    paged: bool = False,
) -> torch.Tensor:
    num_tokens = q_1HTD.shape[2]
    if slot_mapping_T is None:
        length = k_1GND.shape[2] - num_tokens
        used_length = None
        own_k = k_1GND[:, :, length:]
        own_v = v_1GND[:, :, length:]
        k_1GND = k_1GND[:, :, :length]
        v_1GND = v_1GND[:, :, :length]
    else:
        length = k_1GND.shape[2]
        used_length = slot_mapping_T[:1].int()
        own_k = k_1GND.index_select(2, slot_mapping_T)
        own_v = v_1GND.index_select(2, slot_mapping_T)
    own, own_lse = masked_attention(q_1HTD, own_k, own_v, mask_11TT, scale, sinks_H)
    if not length:
        return own
    bounds = torch.arange(2, dtype=torch.int32, device=q_1HTD.device)  # one sequence: from 0 to its length
    q_THD, k_NGD, v_NGD = (states[0].transpose(0, 1) for states in (q_1HTD, k_1GND, v_1GND))
    pages: dict[str, Any] = {}  # a torch without block tables (2.11) has the last kernel alone
    if paged and used_length is not None and length % PAGE == 0:
        pages["block_table"] = torch.arange(length // PAGE, dtype=torch.int32, device=q_1HTD.device)[None]
        k_NGD = k_NGD.unflatten(0, (-1, PAGE))
        v_NGD = v_NGD.unflatten(0, (-1, PAGE))
    # The operator behind torch.nn.attention.varlen, which in torch 2.11 takes neither used lengths nor grouped heads.
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD, k_NGD, v_NGD, bounds * num_tokens, bounds * length, num_tokens, length,
        0.0, False, False, scale=scale, seqused_k=used_length, **pages,
    )  # fmt: skip
    assert lse_HT.shape == q_1HTD.shape[1:3], "(H, T)"
    merged = merge(out_THD.transpose(0, 1)[None], lse_HT[None], own, own_lse)
    return merged if used_length is None else torch.where(used_length > 0, merged, own)


KERNELS: dict[str, Kernel] = {  # in the order in which they are tried
    "triton": _triton,
    "paged": functools.partial(_varlen, paged=True),
    "varlen": _varlen,
}
