"""Tree attention for GPUs in two Triton kernels ("Flash-Decoding"), the fastest kernel of `attention=flash`.

1. The first kernel reads the keys of cached tokens and of the step in one pass. They are divided into splits, so that a
   step of few tokens keeps all SMs busy.
2. The second kernel combines the results of the splits by their log-sum-exp.

H: query heads, G: KV heads, R: query heads of a KV head (H / G), T: step tokens, L: cached tokens, C: cache slots, N:
keys (L + T or C), D: head dimension of queries and keys, E: head dimension of values, S: splits, Q: sequences. The
queries of one KV head are T x R rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from lp.kernel_launch import LAUNCH

LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST_SPLITS = 64
COMBINED_SPLITS = 8  # splits that a program of the second kernel loads at once
PROGRAMS_PER_SM = 2  # programs that fit into the shared memory of an SM
SMS_WITHOUT_A_GPU = 8  # assumed where Triton's interpreter runs the kernels


@triton.jit
def load_queries(
    q_base, head_M, token_M, row_ok_M, stride_qh, stride_qt, D: tl.constexpr, BD: tl.constexpr, PRODUCTS: tl.constexpr
):
    """Load a block of BM rows of queries, (BM, BD), in the dtype in which products are computed (a Triton function).

    A row is one token's query in one head. head_M, token_M: head and token of each row. row_ok_M: whether the row
    exists; other rows are zeros. stride_qh, stride_qt: strides between heads and between tokens. D: head dimension, BD:
    head dimension padded to a power of 2. PRODUCTS: the dtype.
    """
    d = tl.arange(0, BD)
    pointers = q_base + head_M[:, None] * stride_qh + token_M[:, None] * stride_qt + d[None, :]
    return tl.load(pointers, mask=row_ok_M[:, None] & (d < D)[None, :], other=0.0).to(PRODUCTS)


@triton.jit
def _attend(
    q, k_base, v_base, mask_base, block_start, end, length, num_tokens, token_M, row_ok_M,
    stride_kn, stride_vn, stride_mt, scale, top_M, norm_M, acc_ME,
    MASKED: tl.constexpr, ADDITIVE: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to running sums: largest score, sum of weights, weighted values. Exponentials have base 2.

    MASKED: the block may hold keys of the step, which are masked, or places behind its last key, which are not read.
    """
    n = tl.arange(0, BN)
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    # Only the block's start is wide: 64-bit offsets of every element would take twice the registers.
    k_pointers = k_base + tl.cast(block_start, tl.int64) * stride_kn + n[None, :] * stride_kn + d[:, None]
    v_pointers = v_base + tl.cast(block_start, tl.int64) * stride_vn + n[:, None] * stride_vn + e[None, :]
    key_N = block_start + n
    key_ok_N = key_N < end
    if MASKED:  # what lies behind the step's keys may be a NaN, which no weight of 0 would hide
        k = tl.load(k_pointers, mask=key_ok_N[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_pointers, mask=key_ok_N[:, None] & (e < E)[None, :], other=0.0)
    else:
        if D == BD:
            k = tl.load(k_pointers)
        else:
            k = tl.load(k_pointers, mask=(d < D)[:, None], other=0.0)
        if E == BE:
            v = tl.load(v_pointers)
        else:
            v = tl.load(v_pointers, mask=(e < E)[None, :], other=0.0)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    if MASKED:
        own_N = key_N - length  # index of the step's token; cached: negative
        is_own = (own_N >= 0) & key_ok_N
        own_mask = tl.load(
            mask_base + token_M[:, None] * stride_mt + own_N[None, :],
            mask=row_ok_M[:, None] & is_own[None, :],
            other=0,
        )
        if ADDITIVE:
            scores += own_mask.to(tl.float32) * LOG2_E
            scores = tl.where(key_ok_N[None, :], scores, float("-inf"))
        else:
            seen = (own_N < 0)[None, :] | (own_mask != 0)
            scores = tl.where(seen & key_ok_N[None, :], scores, float("-inf"))
    new_top_M = tl.maximum(top_M, tl.max(scores, 1))
    base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)  # -inf minus itself would be NaN
    p = tl.exp2(scores - base_M[:, None])
    keep_M = tl.exp2(top_M - base_M)
    norm_M = norm_M * keep_M + tl.sum(p, 1)
    acc_ME = acc_ME * keep_M[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    return new_top_M, norm_M, acc_ME


@triton.jit(do_not_specialize=["num_tokens", "num_keys"])
def _split_kernel(
    q_base, k_base, v_base, mask_base, slots_base, sequences_base, sinks_base, out_base, lse_base,
    num_tokens, num_keys, scale,
    stride_qh, stride_qt, stride_kg, stride_kn, stride_vg, stride_vn, stride_mt,
    R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_SEQUENCES: tl.constexpr, SPLIT: tl.constexpr,
    ADDITIVE: tl.constexpr, PRODUCTS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Attention of a block of rows of one KV head over one split of the keys; grid (Q x blocks of rows, G, S).

    The rows of each sequence are computed like a step of their own, whose cache begins at some slot; most blocks of a
    short sequence have no rows. Without SPLIT it writes the output, (T, H, E), else the output of its split, (G, S,
    T x R, E), and its log-sum-exp. PRODUCTS: dtype in which products are computed. HAS_SINKS: sinks_base has a score
    for each head's attention sink; with SPLIT the second kernel adds the sinks.
    """
    g = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    row_block = tl.program_id(0)
    rows = num_tokens * R
    first_row = 0
    if HAS_SEQUENCES:
        row_blocks = tl.cdiv(rows, BM)
        sequence = sequences_base + row_block // row_blocks * 4
        row_block = row_block % row_blocks
        first_token = tl.load(sequence).to(tl.int32)
        num_tokens = tl.load(sequence + 1).to(tl.int32)
        first_slot = tl.load(sequence + 2)
        length = tl.load(sequence + 3).to(tl.int32)
        first_row = first_token * R
        q_base += first_token * stride_qt
        k_base += first_slot * stride_kn
        v_base += first_slot * stride_vn
        mask_base += first_token * (stride_mt + 1)
    elif HAS_SLOTS:
        length = tl.load(slots_base).to(tl.int32)  # L is the slot of the step's first token
    else:
        length = num_keys - num_tokens
    end = tl.where(row_block * BM < num_tokens * R, length + num_tokens, 0)
    # The keys there are, and not the capacity, are divided among the splits.
    blocks_per_split = tl.cdiv(tl.cdiv(end, BN), num_splits)
    split_start = split * blocks_per_split * BN
    split_end = tl.minimum(split_start + blocks_per_split * BN, end)
    only_cached_end = tl.minimum(tl.maximum(length // BN * BN, split_start), split_end)

    m = row_block * BM + tl.arange(0, BM)
    token_M = m // R  # a token's heads lie side by side, as in the output
    head_M = g * R + m % R
    row_ok_M = token_M < num_tokens
    e = tl.arange(0, BE)
    q = load_queries(q_base, head_M, token_M, row_ok_M, stride_qh, stride_qt, D, BD, PRODUCTS)
    scale *= LOG2_E
    k_base += g.to(tl.int64) * stride_kg
    v_base += g.to(tl.int64) * stride_vg
    top_M = tl.full((BM,), float("-inf"), tl.float32)
    norm_M = tl.zeros((BM,), tl.float32)
    acc_ME = tl.zeros((BM, BE), tl.float32)
    if HAS_SINKS and not SPLIT:
        top_M = tl.load(sinks_base + head_M, mask=row_ok_M, other=0.0).to(tl.float32) * LOG2_E
        norm_M += 1.0
    for start in tl.range(split_start, only_cached_end, BN):
        top_M, norm_M, acc_ME = _attend(
            q, k_base, v_base, mask_base, start, end, length, num_tokens, token_M, row_ok_M,
            stride_kn, stride_vn, stride_mt, scale, top_M, norm_M, acc_ME,
            False, ADDITIVE, BN, D, BD, E, BE,
        )  # fmt: skip
    for start in tl.range(only_cached_end, split_end, BN):
        top_M, norm_M, acc_ME = _attend(
            q, k_base, v_base, mask_base, start, end, length, num_tokens, token_M, row_ok_M,
            stride_kn, stride_vn, stride_mt, scale, top_M, norm_M, acc_ME,
            True, ADDITIVE, BN, D, BD, E, BE,
        )  # fmt: skip
    out_ME = acc_ME / tl.where(norm_M == 0, 1.0, norm_M)[:, None]
    if SPLIT:
        index_M = (g * num_splits + split).to(tl.int64) * rows + first_row + m
        tl.store(lse_base + index_M, top_M + tl.log2(norm_M), mask=row_ok_M)  # -inf of a split without keys
        tl.store(out_base + index_M[:, None] * E + e[None, :], out_ME, mask=row_ok_M[:, None] & (e < E)[None, :])
    else:
        heads = tl.num_programs(1) * R
        index_M = (first_row // R + token_M).to(tl.int64) * heads + head_M
        tl.store(
            out_base + index_M[:, None] * E + e[None, :],
            out_ME.to(out_base.dtype.element_ty),
            mask=row_ok_M[:, None] & (e < E)[None, :],
        )


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    parts_base, lse_base, sinks_base, out_base, num_splits,
    R: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the outputs of a row's splits, BS of them at a time, into its output; grid (T x R, G)."""
    row = tl.program_id(0)
    g = tl.program_id(1)
    e = tl.arange(0, BE)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    sum_E = tl.zeros((BE,), tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks_base + g * R + row % R).to(tl.float32) * LOG2_E
        total += 1.0
    for first in range(0, num_splits, BS):
        s = first + tl.arange(0, BS)
        index_S = (g * num_splits + s).to(tl.int64) * tl.num_programs(0) + row
        lse_S = tl.load(lse_base + index_S, mask=s < num_splits, other=float("-inf"))
        parts_SE = tl.load(
            parts_base + index_S[:, None] * E + e[None, :],
            mask=(s < num_splits)[:, None] & (e < E)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse_S, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf minus itself would be NaN
        keep = tl.exp2(top - base)
        share_S = tl.exp2(lse_S - base)
        total = total * keep + tl.sum(share_S, 0)
        sum_E = sum_E * keep + tl.sum(parts_SE * share_S[:, None], 0)
        top = new_top
    out_E = sum_E / tl.where(total == 0, 1.0, total)
    heads = tl.num_programs(1) * R
    at = (row // R).to(tl.int64) * heads + g * R + row % R
    tl.store(out_base + at * E + e, out_E.to(out_base.dtype.element_ty), mask=e < E)


def block_sizes(num_rows: int, dim: int, value_dim: int, itemsize: int) -> dict[str, int]:
    """Choose block sizes, number of warps and pipeline stages for the first kernel.

    With these, two programs fit into the shared memory of an H100's SM, and one into that of an A100's SM.

    Args:
        num_rows: rows of queries for each KV head: step tokens times query heads for each KV head.
        dim, value_dim: head dimension of keys and of values, up to 256 each.
        itemsize: bytes of one element of queries, keys and values.

    Returns:
        Compile-time arguments for the kernel launch, by name.
    """
    block_dim = max(triton.next_power_of_2(dim), 16)  # 16: the least that a tensor core multiplies
    block_value_dim = max(triton.next_power_of_2(value_dim), 16)
    small = max(block_dim, block_value_dim) <= 128 and itemsize == 2
    block_rows = min(max(triton.next_power_of_2(num_rows), 16), 32 if itemsize == 4 else 64)
    return {
        "BD": block_dim,
        "BE": block_value_dim,
        "BM": block_rows,
        "BN": 32,
        "num_warps": 8 if itemsize == 4 else 4,
        "num_stages": 3 if small else 2,
    }


def choose_splits(num_row_blocks: int, kv_heads: int, num_key_blocks: int, num_sms: int) -> int:
    """Choose into how many splits the keys are divided: as many as let all programs run at once, within limits.

    There is at most one split for each block of keys.

    Args:
        num_row_blocks: blocks of query rows, for all sequences together.
        kv_heads: number of KV heads.
        num_key_blocks: blocks of keys if the whole buffer is used.
        num_sms: number of streaming multiprocessors of the GPU.
    """
    fitting = PROGRAMS_PER_SM * num_sms // (num_row_blocks * kv_heads)
    return max(1, min(fitting, num_key_blocks, LARGEST_SPLITS))


def products_of(q: torch.Tensor) -> tl.dtype:
    """The dtype in which products with these queries are computed: their own dtype.

    In Triton's interpreter on a CPU, which has no bfloat16, it is float32.
    """
    if q.device.type == "cpu" or q.dtype is torch.float32:
        return tl.float32
    return tl.float16 if q.dtype is torch.float16 else tl.bfloat16


@functools.cache
def num_sms_of(device: torch.device) -> int:
    """Number of streaming multiprocessors of a GPU; for a CPU, where Triton's interpreter runs, an assumed number."""
    if device.type != "cuda":
        return SMS_WITHOUT_A_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_tree_attention(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GNE: torch.Tensor,
    mask_TT: torch.Tensor,
    slot_mapping_T: torch.Tensor | None,
    scale: float,
    sequences_Q4: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Launch the kernels of the operator `tree_attention`; takes its arguments and one more, returns the same result.

    Args:
        num_splits: number of splits that the keys are divided into; None: chosen by the shapes and the device.
    """
    q_HTD, k_GND, v_GNE = (states[0] if states.stride(-1) == 1 else states[0].contiguous()
                           for states in (q_1HTD, k_1GND, v_1GNE))  # fmt: skip
    heads, num_tokens, dim = q_HTD.shape
    kv_heads, num_keys, value_dim = v_GNE.shape
    repeats = heads // kv_heads
    additive = mask_TT.is_floating_point()
    mask_TT = mask_TT if mask_TT.stride(-1) == 1 else mask_TT.contiguous()
    mask_TT = mask_TT if additive else mask_TT.view(torch.uint8)
    num_rows = num_tokens * repeats
    sizes = block_sizes(num_rows, dim, value_dim, q_HTD.itemsize)
    num_sequences = 1 if sequences_Q4 is None else len(sequences_Q4)
    num_row_blocks = triton.cdiv(num_rows, sizes["BM"])
    if num_splits is None:
        num_key_blocks = triton.cdiv(num_keys, sizes["BN"])
        used = num_row_blocks + num_sequences - 1  # at most so many have rows
        num_splits = choose_splits(used, kv_heads, num_key_blocks, num_sms_of(q_HTD.device))
    out_THE = q_HTD.new_empty(num_tokens, heads, value_dim)
    split = num_splits > 1
    sinks = q_HTD if sinks_H is None else sinks_H.contiguous()
    parts = q_HTD.new_empty((kv_heads, num_splits, num_rows, value_dim), dtype=torch.float32) if split else out_THE
    lse = q_HTD.new_empty((kv_heads, num_splits, num_rows), dtype=torch.float32) if split else out_THE
    with torch.cuda.device_of(q_HTD):  # Triton launches on the current device
        _split_kernel[(num_sequences * num_row_blocks, kv_heads, num_splits)](
            q_HTD, k_GND, v_GNE, mask_TT, mask_TT if slot_mapping_T is None else slot_mapping_T,
            mask_TT if sequences_Q4 is None else sequences_Q4, sinks, parts, lse, num_tokens, num_keys, scale,
            *q_HTD.stride()[:2], *k_GND.stride()[:2], *v_GNE.stride()[:2], mask_TT.stride(0),
            R=repeats, D=dim, E=value_dim, HAS_SLOTS=slot_mapping_T is not None,
            HAS_SEQUENCES=sequences_Q4 is not None, SPLIT=split, ADDITIVE=additive,
            PRODUCTS=products_of(q_HTD), HAS_SINKS=sinks_H is not None, **sizes, **LAUNCH,
        )  # fmt: skip
        if split:
            _combine_kernel[(num_rows, kv_heads)](
                parts, lse, sinks, out_THE, num_splits,
                R=repeats, E=value_dim, BE=sizes["BE"], BS=COMBINED_SPLITS, HAS_SINKS=sinks_H is not None, num_warps=1,
                **LAUNCH,
            )  # fmt: skip
    return out_THE[None].transpose(1, 2)


@torch.library.custom_op("lp::tree_attention", mutates_args=())
def tree_attention(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GNE: torch.Tensor,
    mask_TT: torch.Tensor,
    slot_mapping_T: torch.Tensor | None,
    scale: float,
    sequences_Q4: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention in a tree-shaped step on a GPU, as a torch operator that a CUDA graph can record.

    Each token sees all cached tokens, and step tokens by a mask. Products are added up in float32, whatever the dtype.
    Keys after the step's last one are never read. H: query heads, G: KV heads, D and E: head dimensions of keys and of
    values, T: step tokens, N: keys, L: cached tokens, C: cache slots.

    Args:
        q_1HTD: queries of the step's tokens: float16, bfloat16 or float32, like keys and values.
        k_1GND, v_1GNE: keys and values. Without `slot_mapping_T`, those of the cached tokens, followed by the step's, N
            = L + T; with it, those of all cache slots, N = C. Any strides; if the last dimension is not contiguous,
            they are copied.
        mask_TT: bool, whether each token of the step (row) sees each token of the step (column); or numbers that are
            added to the scores.
        slot_mapping_T: int64, the consecutive cache slots of the step's tokens. The first one is L, which a CUDA graph
            can read only from a tensor.
        scale: factor on the scores.
        sequences_Q4: int64, for a step of several sequences whose caches are in one pool: for each sequence (first
            token, number of tokens, first slot, number of cached tokens). Each token belongs to a sequence; a sequence
            may have no tokens. None: the step has one sequence.
        sinks_H: score of each head's attention sink, in any float dtype; None: no sinks.

    Returns:
        (1, H, T, E), a transposed view of memory laid out as (T, H, E).
    """
    return launch_tree_attention(q_1HTD, k_1GND, v_1GNE, mask_TT, slot_mapping_T, scale, sequences_Q4, sinks_H)


@tree_attention.register_fake
def _(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GNE: torch.Tensor,
    mask_TT: torch.Tensor,
    slot_mapping_T: torch.Tensor | None,
    scale: float,
    sequences_Q4: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    _, heads, num_tokens, _ = q_1HTD.shape
    return q_1HTD.new_empty(1, num_tokens, heads, v_1GNE.shape[-1]).transpose(1, 2)
