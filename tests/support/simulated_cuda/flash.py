"""The kernels of flash attention, which no CPU has: their conditions, and their results in float32.

H: query heads, G: KV heads, D: head dimension, T: queries, N: keys.
"""

from __future__ import annotations

import torch

HALVES = (torch.float16, torch.bfloat16)


def flash_attention_forward(
    q_THD: torch.Tensor,
    k_NGD: torch.Tensor,
    v_NGD: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`aten::_flash_attention_forward` of one sequence without a mask: (T, H, D), its log-sum-exp (H, T), and three
    tensors that are of use in training alone.

    Args:
        seqused_k: int32 (1,), keys to be read: data, so that a graph may hold a longer buffer.
        block_table: int32 (1, pages), the pages of k and v, which are then (pages, page, G, D).
    """
    _require(q_THD.dtype in HALVES, f"takes float16 and bfloat16, not {q_THD.dtype}")
    _require(q_THD.dtype == k_NGD.dtype == v_NGD.dtype, "takes one dtype")
    _require(all(x.stride(-1) == 1 for x in (q_THD, k_NGD, v_NGD)), "takes rows without gaps")
    _require(q_THD.shape[-1] % 8 == 0 and q_THD.shape[-1] <= 256, f"takes no head dimension of {q_THD.shape[-1]}")
    bounds = [x for x in (query_bounds, key_bounds, seqused_k, block_table) if x is not None]
    _require(all(x.dtype is torch.int32 for x in bounds), "takes int32 for bounds, lengths and pages")
    _require(not is_causal and len(query_bounds) == 2, "is simulated for one sequence without a causal mask")
    _require(not dropout_p and not return_debug_mask, "is simulated for inference")
    _require(q_THD.shape[1] % k_NGD.shape[-2] == 0, "takes query heads that are a multiple of the KV heads")
    if block_table is not None:
        _require(k_NGD.shape[1] % 256 == 0, f"takes no pages of {k_NGD.shape[1]}")
        k_NGD = k_NGD[block_table[0].long()].flatten(0, 1)
        v_NGD = v_NGD[block_table[0].long()].flatten(0, 1)
    used = int(seqused_k[0]) if seqused_k is not None else int(key_bounds[1])
    heads = q_THD.shape[1]
    unused = (torch.zeros(2, dtype=torch.uint64), q_THD.new_empty(0), q_THD.new_empty(0))
    if used == 0:
        return torch.zeros_like(q_THD), q_THD.new_full((heads, len(q_THD)), torch.inf, dtype=torch.float32), *unused
    q_HTD = q_THD.float().transpose(0, 1)
    repeats = heads // k_NGD.shape[1]
    k_HND, v_HND = (x[:used].float().transpose(0, 1).repeat_interleave(repeats, 0) for x in (k_NGD, v_NGD))
    scores_HTN = q_HTD @ k_HND.mT * (scale or q_THD.shape[-1] ** -0.5)
    out_THD = (scores_HTN.softmax(-1) @ v_HND).transpose(0, 1).to(q_THD.dtype).contiguous()
    return out_THD, scores_HTN.logsumexp(-1), *unused


def tree_attention(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GND: torch.Tensor,
    mask_TT: torch.Tensor,
    slot_mapping_T: torch.Tensor | None,
    scale: float,
    sequences_Q4: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """`lp.attention.tree_kernel.tree_attention` with an additive mask, without Triton."""
    dtypes = (*HALVES, torch.float32)
    _require(q_1HTD.dtype in dtypes and q_1HTD.dtype == k_1GND.dtype == v_1GND.dtype, "takes one dtype, no float64")
    _require(slot_mapping_T is None or slot_mapping_T.dtype is torch.int64, "takes int64 slots")
    _require(mask_TT.is_floating_point(), "is simulated for an additive mask")
    if sequences_Q4 is not None:
        out_1HTD = torch.full((*q_1HTD.shape[:3], v_1GND.shape[3]), torch.nan, dtype=q_1HTD.dtype)
        for first_token, num_tokens, first_slot, length in sequences_Q4.tolist():
            own = slice(first_token, first_token + num_tokens)
            if num_tokens:
                k, v = (x[:, :, first_slot : first_slot + length + num_tokens] for x in (k_1GND, v_1GND))
                out_1HTD[:, :, own] = tree_attention(
                    q_1HTD[:, :, own], k, v, mask_TT[own, own], None, scale, None, sinks_H
                )
        return out_1HTD.transpose(1, 2).contiguous().transpose(1, 2)
    num_tokens = len(mask_TT)
    end = k_1GND.shape[2] if slot_mapping_T is None else int(slot_mapping_T[0]) + num_tokens
    repeats = q_1HTD.shape[1] // k_1GND.shape[1]
    k_1HND, v_1HND = (x[:, :, :end].float().repeat_interleave(repeats, 1) for x in (k_1GND, v_1GND))
    scores_1HTN = q_1HTD.float() @ k_1HND.mT * scale
    scores_1HTN[..., end - num_tokens :] += mask_TT.float()
    if sinks_H is not None:
        sinks_1HT1 = sinks_H.float()[None, :, None, None].expand(*scores_1HTN.shape[:3], 1)
        scores_1HTN = torch.cat([scores_1HTN, sinks_1HT1], -1)
        v_1HND = torch.nn.functional.pad(v_1HND, (0, 0, 0, 1))
    out_1HTD = (scores_1HTN.softmax(-1) @ v_1HND).to(q_1HTD.dtype)
    return out_1HTD.transpose(1, 2).contiguous().transpose(1, 2)


def _require(met: bool, condition: str) -> None:
    if not met:
        raise RuntimeError(f"FlashAttention {condition}")
