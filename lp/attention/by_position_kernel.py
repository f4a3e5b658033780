"""Attention in two Triton kernels whose result for a token has the same bits in every forward pass, for GPUs.

It is the GPU part of `lp.attention.by_position`, which defines A(p) and the tail of a token.

1. The first kernel sums up splits. Split s has the cached keys at positions from SPLIT s to before SPLIT (s + 1) that a
   token sees before A(p). The kernel does so for many tokens at once, but a token's sum depends neither on other tokens
   nor on which program computes it.
2. The second kernel sums up the tail of each token in the order of positions, and then adds the token's splits, in
   their order, and its tail.

Blocks of rows and keys have the same sizes for every number of tokens, and a row goes through the same blocks whatever
other rows see. So tensor cores always add in the same way. Memory beyond the keys that a program needs is never read,
as it may hold NaNs.

H: query heads, G: KV heads, R: query heads of a KV head (H / G), T: tokens of the forward pass, N: keys, D: head
dimension of queries and keys, E: head dimension of values, U: keys of a tail, S: splits that the N keys have room for,
Q: sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lp.attention.key_places import TAIL, TILE
from lp.attention.tree_kernel import block_sizes, choose_splits, load_queries, num_sms_of, products_of
from lp.kernel_launch import LAUNCH

LOG2_E = tl.constexpr(1.4426950408889634)
SPLIT = TILE
ROWS = 64  # most rows that a program computes
TAIL_KEYS = 32  # keys of a tail that are added up at once
NOWHERE = tl.constexpr(1 << 30)  # a position behind all others


@triton.jit
def _with_keys(q, k, v, seen, scale, top_M, norm_M, acc_ME):
    """Add a block of keys to running sums: largest score, sum of weights, weighted values. Exponentials have base 2.

    seen: which keys each row sees; the others change nothing.
    """
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_top_M = tl.maximum(top_M, tl.max(scores, 1))
    base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)  # -inf minus itself would be NaN
    p = tl.exp2(scores - base_M[:, None])
    keep_M = tl.exp2(top_M - base_M)
    norm_M = norm_M * keep_M + tl.sum(p, 1)
    acc_ME = acc_ME * keep_M[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    return new_top_M, norm_M, acc_ME


@triton.jit
def _together(top_M, norm_M, acc_ME, other_top_M, other_norm_M, other_acc_ME):
    """Add the sums over two sets of keys; sums over no keys change no bit."""
    new_top_M = tl.maximum(top_M, other_top_M)
    base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
    keep_M = tl.exp2(top_M - base_M)
    others_M = tl.exp2(other_top_M - base_M)
    norm_M = norm_M * keep_M + other_norm_M * others_M
    return new_top_M, norm_M, acc_ME * keep_M[:, None] + other_acc_ME * others_M[:, None]


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _split_kernel(
    q_base, k_base, v_base, tail_starts_base, window_starts_base, sequences_base, parts_base, tops_base, norms_base,
    num_tokens, num_splits, scale, stride_qh, stride_qt, stride_kg, stride_kn, stride_vg, stride_vn,
    R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPLIT: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Sum up some of the splits for a block of rows of one sequence and KV head; grid (Q x blocks of rows, G, programs
    that share the splits).

    It writes the sums of each split by itself: weighted values (G, S, T x R, E), largest scores and sums of weights
    (G, S, T x R). Splits in which none of its rows sees a key are left out.
    """
    g = tl.program_id(1)
    row_blocks = tl.cdiv(num_tokens * R, BM)
    sequence = sequences_base + tl.program_id(0) // row_blocks * 4
    first_token = tl.load(sequence).to(tl.int32)
    own_tokens = tl.load(sequence + 1).to(tl.int32)
    first_key = tl.load(sequence + 2)
    m = tl.program_id(0) % row_blocks * BM + tl.arange(0, BM)
    row_ok_M = m // R < own_tokens
    token_M = first_token + m // R  # a token's heads lie side by side, as in the output
    head_M = g * R + m % R
    tail_start_M = tl.load(tail_starts_base + token_M, mask=row_ok_M, other=0).to(tl.int32)
    window_start_M = tl.load(window_starts_base + token_M, mask=row_ok_M, other=NOWHERE).to(tl.int32)
    begin = tl.maximum(tl.min(window_start_M, 0), 0)
    end = tl.max(tail_start_M, 0)
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    n = tl.arange(0, BN)
    q = load_queries(q_base, head_M, token_M, row_ok_M, stride_qh, stride_qt, D, BD, PRODUCTS)
    scale *= LOG2_E
    k_base += first_key * stride_kn + g.to(tl.int64) * stride_kg
    v_base += first_key * stride_vn + g.to(tl.int64) * stride_vg
    for split in tl.range(begin // SPLIT + tl.program_id(2), tl.cdiv(end, SPLIT), tl.num_programs(2)):
        top_M = tl.full((BM,), float("-inf"), tl.float32)
        norm_M = tl.zeros((BM,), tl.float32)
        acc_ME = tl.zeros((BM, BE), tl.float32)
        for first in tl.range(0, SPLIT, BN):  # all of it, however few keys it has
            start = split * SPLIT + first
            k_pointers = k_base + tl.cast(start, tl.int64) * stride_kn + n[None, :] * stride_kn + d[:, None]
            v_pointers = v_base + tl.cast(start, tl.int64) * stride_vn + n[:, None] * stride_vn + e[None, :]
            position_N = start + n
            k = tl.load(k_pointers, mask=(position_N < end)[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(v_pointers, mask=(position_N < end)[:, None] & (e < E)[None, :], other=0.0)
            seen = (position_N[None, :] < tail_start_M[:, None]) & (position_N[None, :] >= window_start_M[:, None])
            top_M, norm_M, acc_ME = _with_keys(q, k, v, seen, scale, top_M, norm_M, acc_ME)
        index_M = (g * num_splits + split).to(tl.int64) * num_tokens * R + first_token * R + m
        tl.store(tops_base + index_M, top_M, mask=row_ok_M)
        tl.store(norms_base + index_M, norm_M, mask=row_ok_M)
        tl.store(parts_base + index_M[:, None] * E + e[None, :], acc_ME, mask=row_ok_M[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def _tail_kernel(
    q_base, k_base, v_base, tail_starts_base, window_starts_base, tail_keys_base, seen_base, parts_base, tops_base,
    norms_base, out_base, num_splits, scale, stride_qh, stride_qt, stride_kg, stride_kn, stride_vg, stride_vn,
    R: tl.constexpr, BR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    U: tl.constexpr, BU: tl.constexpr, SPLIT: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Compute the output of one token in the heads of one KV head: its splits in order, then its tail; grid (T, G)."""
    token = tl.program_id(0)
    g = tl.program_id(1)
    r = tl.arange(0, BR)
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    row_ok_R = r < R
    q = tl.load(
        q_base + (g * R + r)[:, None] * stride_qh + token * stride_qt + d[None, :],
        mask=row_ok_R[:, None] & (d < D)[None, :],
        other=0.0,
    ).to(PRODUCTS)
    scale *= LOG2_E
    k_base += g.to(tl.int64) * stride_kg
    v_base += g.to(tl.int64) * stride_vg
    tail_top_R = tl.full((BR,), float("-inf"), tl.float32)
    tail_norm_R = tl.zeros((BR,), tl.float32)
    tail_acc_RE = tl.zeros((BR, BE), tl.float32)
    for first in tl.range(0, U, BU):
        at_U = token * U + first + tl.arange(0, BU)
        key_U = tl.load(tail_keys_base + at_U)
        seen_U = tl.load(seen_base + at_U) != 0
        k = tl.load(
            k_base + key_U[None, :] * stride_kn + d[:, None], mask=seen_U[None, :] & (d < D)[:, None], other=0.0
        )
        v = tl.load(
            v_base + key_U[:, None] * stride_vn + e[None, :], mask=seen_U[:, None] & (e < E)[None, :], other=0.0
        )
        tail_top_R, tail_norm_R, tail_acc_RE = _with_keys(
            q, k, v, seen_U[None, :], scale, tail_top_R, tail_norm_R, tail_acc_RE
        )
    top_R = tl.full((BR,), float("-inf"), tl.float32)
    norm_R = tl.zeros((BR,), tl.float32)
    acc_RE = tl.zeros((BR, BE), tl.float32)
    first_split = tl.maximum(tl.load(window_starts_base + token).to(tl.int32), 0) // SPLIT
    end_split = tl.cdiv(tl.load(tail_starts_base + token).to(tl.int32), SPLIT)
    for split in tl.range(first_split, end_split):
        index_R = ((g * num_splits + split).to(tl.int64) * tl.num_programs(0) + token) * R + r
        split_top_R = tl.load(tops_base + index_R, mask=row_ok_R, other=float("-inf"))
        split_norm_R = tl.load(norms_base + index_R, mask=row_ok_R, other=0.0)
        split_acc_RE = tl.load(
            parts_base + index_R[:, None] * E + e[None, :], mask=row_ok_R[:, None] & (e < E)[None, :], other=0.0
        )
        top_R, norm_R, acc_RE = _together(top_R, norm_R, acc_RE, split_top_R, split_norm_R, split_acc_RE)
    top_R, norm_R, acc_RE = _together(top_R, norm_R, acc_RE, tail_top_R, tail_norm_R, tail_acc_RE)
    out_RE = acc_RE / norm_R[:, None]  # a token sees itself
    at_R = (token * tl.num_programs(1) + g).to(tl.int64) * R + r
    tl.store(
        out_base + at_R[:, None] * E + e[None, :],
        out_RE.to(out_base.dtype.element_ty),
        mask=row_ok_R[:, None] & (e < E)[None, :],
    )


def launch_by_position(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GNE: torch.Tensor,
    tail_starts_T: torch.Tensor,
    window_starts_T: torch.Tensor,
    tail_keys_TU: torch.Tensor,
    seen_TU: torch.Tensor,
    sequences_Q4: torch.Tensor,
    scale: float,
    num_programs: int | None = None,
) -> torch.Tensor:
    """Launch the kernels of the operator `by_position`; takes its arguments and one more, returns the same result.

    Args:
        num_programs: number of GPU programs among which the keys of a block of rows are divided; results do not depend
            on it. None: chosen by the shapes and the device.
    """
    q_HTD, k_GND, v_GNE = (states[0] if states.stride(-1) == 1 else states[0].contiguous()
                           for states in (q_1HTD, k_1GND, v_1GNE))  # fmt: skip
    heads, num_tokens, dim = q_HTD.shape
    kv_heads, num_keys, value_dim = v_GNE.shape
    repeats = heads // kv_heads
    num_rows = num_tokens * repeats
    sizes = split_sizes(dim, value_dim, q_HTD.itemsize)
    num_splits = triton.cdiv(num_keys, SPLIT)
    num_sequences = len(sequences_Q4)
    row_blocks = triton.cdiv(num_rows, sizes["BM"])
    if num_programs is None:
        used = row_blocks + num_sequences - 1  # at most so many have rows
        num_programs = choose_splits(used, kv_heads, num_splits, num_sms_of(q_HTD.device))
    parts = q_HTD.new_empty((kv_heads, num_splits, num_rows, value_dim), dtype=torch.float32)
    tops, norms = q_HTD.new_empty((2, kv_heads, num_splits, num_rows), dtype=torch.float32)
    out_1THE = q_HTD.new_empty(1, num_tokens, heads, value_dim)
    strides = *q_HTD.stride()[:2], *k_GND.stride()[:2], *v_GNE.stride()[:2]
    fixed = {"R": repeats, "D": dim, "E": value_dim, "SPLIT": SPLIT, "PRODUCTS": products_of(q_HTD)}
    with torch.cuda.device_of(q_HTD):  # Triton launches on the current device
        _split_kernel[(num_sequences * row_blocks, kv_heads, num_programs)](
            q_HTD, k_GND, v_GNE, tail_starts_T, window_starts_T, sequences_Q4, parts, tops, norms,
            num_tokens, num_splits, scale, *strides, **fixed, **sizes, **LAUNCH,
        )  # fmt: skip
        _tail_kernel[(num_tokens, kv_heads)](
            q_HTD, k_GND, v_GNE, tail_starts_T, window_starts_T, tail_keys_TU, seen_TU.view(torch.uint8),
            parts, tops, norms, out_1THE, num_splits, scale, *strides, **fixed, **tail_sizes(repeats, sizes), **LAUNCH,
        )  # fmt: skip
    return out_1THE


def split_sizes(dim: int, value_dim: int, itemsize: int) -> dict[str, int]:
    """Choose block sizes and number of warps for the first kernel, independent of the number of tokens.

    Args:
        dim, value_dim: head dimension of keys and of values, up to 256 each.
        itemsize: bytes of one element of queries, keys and values.

    Returns:
        Compile-time arguments for the kernel launch, by name.
    """
    sizes = block_sizes(ROWS, dim, value_dim, itemsize)
    if max(sizes["BD"], sizes["BE"]) > 128:
        sizes["num_warps"] = 8  # fewer have too few registers
    return sizes


def tail_sizes(repeats: int, sizes: dict[str, int]) -> dict[str, int]:
    """Choose block sizes and number of warps for the second kernel.

    Args:
        repeats: number of query heads for each KV head.
        sizes: block sizes of the first kernel, as `split_sizes` returns them.

    Returns:
        Compile-time arguments for the kernel launch, by name.
    """
    block_rows = max(triton.next_power_of_2(repeats), 16)  # 16: the least that a tensor core multiplies
    return {
        "BR": block_rows,
        "BD": sizes["BD"],
        "BE": sizes["BE"],
        "U": TAIL,
        "BU": TAIL_KEYS,
        "num_warps": sizes["num_warps"],
    }


@torch.library.custom_op("lp::by_position", mutates_args=())
def by_position(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GNE: torch.Tensor,
    tail_starts_T: torch.Tensor,
    window_starts_T: torch.Tensor,
    tail_keys_TU: torch.Tensor,
    seen_TU: torch.Tensor,
    sequences_Q4: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute attention on a GPU in an order of sums that depends on positions only; a torch operator for CUDA graphs.

    Each token attends to the keys along its path, up to its own position. T: tokens of the forward pass, N: keys, H:
    query heads, G: KV heads, D and E: head dimensions of keys and of values.

    Args:
        q_1HTD: queries of the tokens: float16, bfloat16 or float32, like keys and values.
        k_1GND, v_1GNE: keys and values of all sequences, both of cached tokens and of tokens of the forward pass.
        tail_starts_T, window_starts_T, tail_keys_TU, seen_TU, sequences_Q4: where the keys lie that each token attends
            to; see the fields of `lp.attention.key_places.KeyPlaces`. Each token belongs to a sequence; a sequence may
            have no tokens.
        scale: factor on the scores.

    Returns:
        (1, T, H, E).
    """
    return launch_by_position(
        q_1HTD, k_1GND, v_1GNE, tail_starts_T, window_starts_T, tail_keys_TU, seen_TU, sequences_Q4, scale
    )


@by_position.register_fake
def _(q_1HTD: torch.Tensor, k_1GND: torch.Tensor, v_1GNE: torch.Tensor, *places_and_scale: Any) -> torch.Tensor:
    return q_1HTD.new_empty(1, q_1HTD.shape[2], q_1HTD.shape[1], v_1GNE.shape[3])
