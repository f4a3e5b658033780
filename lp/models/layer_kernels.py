"""The small operations of a decoder layer as Triton kernels, one launch each.

These are an RMS norm; rotary positions together with the write to the KV cache; a gated activation; and the moves that
bring accepted tokens side by side in the KV cache, in all layers at once. They round at the same places as
`lp.models.layer_operations`. `lp.models.kernel_choice` decides which of them captured steps run.

T: step tokens, E: hidden size, H: query heads, G: KV heads, D: head dimension, C: cache slots, F: intermediate size, M:
moved slots, n: keys and values of all layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lp.kernel_launch import LAUNCH

HEADS_A_PROGRAM = 8
FEATURES_A_PROGRAM = 1024


@triton.jit
def _norm_kernel(
    x_base, weight_base, out_base, stride_x, eps, E: tl.constexpr, BE: tl.constexpr,
    ROUNDED: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """One token; grid (T,). ROUNDED: before the product with the weight; OFFSET: the factor is 1 + weight."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    x_E = tl.load(x_base + token * stride_x + e, mask=e < E, other=0.0).to(tl.float32)
    weight_E = tl.load(weight_base + e, mask=e < E, other=0.0).to(tl.float32)
    normed_E = x_E * tl.rsqrt(tl.sum(x_E * x_E, 0) / E + eps)
    if ROUNDED:
        normed_E = normed_E.to(out_base.dtype.element_ty).to(tl.float32)
    if OFFSET:
        weight_E += 1.0
    tl.store(out_base + token * E + e, (normed_E * weight_E).to(out_base.dtype.element_ty), mask=e < E)


@triton.jit
def _rotate_kernel(
    rotated_base, values_base, cos_base, sin_base, slots_base, q_base, k_cache_base, v_cache_base,
    stride_rt, stride_vt, stride_kg, stride_kc, stride_wg, stride_wc,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; grid (T, blocks of heads): queries, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    head_B = (tl.program_id(1) * BH + tl.arange(0, BH)).to(tl.int64)
    d = tl.arange(0, BD)
    slot = tl.load(slots_base + token)
    is_rotated_B = head_B < H + G
    is_value_B = (head_B >= H + G) & (head_B < H + 2 * G)
    in_head = (d < D)[None, :]
    swapped_d = tl.where(d < D // 2, d + D // 2, d - D // 2)
    heads = rotated_base + token * stride_rt + head_B[:, None] * D
    x_BD = tl.load(heads + d[None, :], mask=is_rotated_B[:, None] & in_head, other=0.0).to(tl.float32)
    swapped_BD = tl.load(heads + swapped_d[None, :], mask=is_rotated_B[:, None] & in_head, other=0.0).to(tl.float32)
    cos_D = tl.load(cos_base + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    sin_D = tl.load(sin_base + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    dtype = cos_base.dtype.element_ty  # in which the products are rounded
    y_BD = (x_BD * cos_D[None, :]).to(dtype).to(tl.float32)
    y_BD = (y_BD + swapped_BD * sin_D[None, :]).to(dtype).to(q_base.dtype.element_ty)
    tl.store(q_base + (token * H + head_B[:, None]) * D + d[None, :], y_BD, mask=(head_B < H)[:, None] & in_head)
    k_B = k_cache_base + (head_B - H) * stride_kg + slot * stride_kc
    tl.store(k_B[:, None] + d[None, :], y_BD, mask=(is_rotated_B & (head_B >= H))[:, None] & in_head)
    value_B = head_B - H - G
    v_BD = tl.load(
        values_base + token * stride_vt + value_B[:, None] * D + d[None, :],
        mask=is_value_B[:, None] & in_head,
        other=0.0,
    )
    v_B = v_cache_base + value_B * stride_wg + slot * stride_wc
    tl.store(v_B[:, None] + d[None, :], v_BD, mask=is_value_B[:, None] & in_head)


@triton.jit
def _silu_kernel(gate_base, up_base, out_base, stride_gt, stride_ut, num_features, BF: tl.constexpr):
    """Some features of one token; grid (T, blocks of features)."""
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    gate_F = tl.load(gate_base + token * stride_gt + f, mask=f < num_features, other=0.0).to(tl.float32)
    up_F = tl.load(up_base + token * stride_ut + f, mask=f < num_features, other=0.0).to(tl.float32)
    activated_F = (gate_F / (1.0 + tl.exp(-gate_F))).to(out_base.dtype.element_ty).to(tl.float32)
    tl.store(
        out_base + token * num_features + f, (activated_F * up_F).to(out_base.dtype.element_ty), mask=f < num_features
    )


@triton.jit
def _move_kernel(
    buffer_base, sources_base, targets_base, stride_n, stride_g, stride_c,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """All moves of one head of one layer, in their order; grid (n x G,)."""
    row = tl.program_id(0).to(tl.int64)
    base = buffer_base + row // G * stride_n + row % G * stride_g
    m = tl.arange(0, M)
    moves = tl.load(sources_base + m) != tl.load(targets_base + m)  # padding, at the end, moves a slot to itself
    d = tl.arange(0, BD)
    for index in range(tl.sum(moves.to(tl.int32), 0)):
        source = tl.load(sources_base + index)
        target = tl.load(targets_base + index)
        states_D = tl.load(base + source * stride_c + d, mask=d < D)
        tl.debug_barrier()  # whichever thread loads an element, it does before another move overwrites it
        tl.store(base + target * stride_c + d, states_D, mask=d < D)


@torch.library.custom_op("lp::normalize", mutates_args=())
def normalize(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, rounded: bool, offset: bool) -> torch.Tensor:
    """RMS norm of every token: divides by the root mean square, multiplies by the weight; returns (T, E).

    Args:
        x_TE: hidden states of T tokens; the E numbers of a token lie side by side in memory.
        weight_E: the norm's weight.
        eps: added to the mean square.
        rounded: whether to round to the model's dtype before multiplying by the weight; False: afterwards.
        offset: whether to multiply by 1 + weight, as Gemma's norms do.
    """
    num_tokens, size = x_TE.shape
    out_TE = x_TE.new_empty(num_tokens, size)
    block = triton.next_power_of_2(size)
    with torch.cuda.device_of(x_TE):  # Triton launches on the current device
        _norm_kernel[(num_tokens,)](
            x_TE, weight_E, out_TE, x_TE.stride(0), eps, E=size, BE=block, ROUNDED=rounded, OFFSET=offset,
            num_warps=min(max(block // 512, 1), 16), **LAUNCH,
        )  # fmt: skip
    return out_TE


@torch.library.custom_op("lp::rotate_and_store", mutates_args=("k_1GCD", "v_1GCD"))
def rotate_and_store(
    rotated_THD: torch.Tensor,
    values_TGD: torch.Tensor,
    cos_T1D: torch.Tensor,
    sin_T1D: torch.Tensor,
    k_1GCD: torch.Tensor,
    v_1GCD: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """Apply rotary positions to queries and keys, write keys and values to their cache slots, and return the queries.

    T: tokens, H: query heads, G: KV heads, D: head dimension, C: cache slots.

    Args:
        rotated_THD: queries, then keys, (T, H + G, D) before rotation; the heads of a token lie side by side in memory.
        values_TGD: values; the heads of a token lie side by side in memory.
        cos_T1D, sin_T1D: cosines and sines of the rotation's angles, contiguous; the first half of the sines is
            negated.
        k_1GCD, v_1GCD: keys and values in all cache slots of the layer, which are written to.
        slots_T: int64, the cache slot of each token.

    Returns:
        Rotated queries (T, H, D).
    """
    num_tokens, rotated_heads, dim = rotated_THD.shape
    kv_heads = values_TGD.shape[1]
    num_heads = rotated_heads - kv_heads
    q_THD = rotated_THD.new_empty(num_tokens, num_heads, dim)
    block = min(HEADS_A_PROGRAM, triton.next_power_of_2(num_heads + 2 * kv_heads))
    with torch.cuda.device_of(rotated_THD):
        _rotate_kernel[(num_tokens, triton.cdiv(num_heads + 2 * kv_heads, block))](
            rotated_THD, values_TGD, cos_T1D, sin_T1D, slots_T, q_THD, k_1GCD, v_1GCD,
            rotated_THD.stride(0), values_TGD.stride(0), *k_1GCD.stride()[1:3], *v_1GCD.stride()[1:3],
            H=num_heads, G=kv_heads, D=dim, BD=triton.next_power_of_2(dim), BH=block, **LAUNCH,
        )  # fmt: skip
    return q_THD


@torch.library.custom_op("lp::silu_times", mutates_args=())
def silu_times(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """Compute the gated activation of an MLP, silu(gate) x up; returns (T, F).

    Args:
        gate_TF, up_TF: gate and up projection of T tokens; the F numbers of a token lie side by side in memory.
    """
    num_tokens, num_features = gate_TF.shape
    out_TF = gate_TF.new_empty(num_tokens, num_features)
    with torch.cuda.device_of(gate_TF):
        _silu_kernel[(num_tokens, triton.cdiv(num_features, FEATURES_A_PROGRAM))](
            gate_TF, up_TF, out_TF, gate_TF.stride(0), up_TF.stride(0), num_features, BF=FEATURES_A_PROGRAM,
            **LAUNCH,
        )  # fmt: skip
    return out_TF


@torch.library.custom_op("lp::move_slots", mutates_args=("buffer_nGCD",))
def move_slots(buffer_nGCD: torch.Tensor, source_M: torch.Tensor, target_M: torch.Tensor) -> None:
    """Move KV between cache slots, in all layers by one launch, to bring accepted tokens side by side.

    Args:
        buffer_nGCD: keys and values of all layers, changed in place: n of them, G KV heads, C slots, head dimension D.
        source_M, target_M: int64, slots to move from and to. Within one sequence they ascend, and no target is greater
            than its source. Padding comes last and moves a slot to itself.
    """
    count, kv_heads, _, dim = buffer_nGCD.shape
    with torch.cuda.device_of(buffer_nGCD):
        _move_kernel[(count * kv_heads,)](
            buffer_nGCD, source_M, target_M, *buffer_nGCD.stride()[:3],
            G=kv_heads, D=dim, BD=triton.next_power_of_2(dim), M=len(source_M), num_warps=1, **LAUNCH,
        )  # fmt: skip
