"""Attention of a tree-shaped step: all cached keys without a mask, the step's own rows with theirs, merged by the
log-sum-exp of both (the split of FlashAttention, arXiv 2205.14135, section 3.1).

T: rows of the step, L: cached rows, C: capacity of the cache, H: query heads, G: KV heads, D: head dimension.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

SHORT = 512  # cached rows up to which one masked call is faster on a CPU than two and their merge
BLOCK = 128  # rows of a prompt that a CPU takes at once
_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def step_attention(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GND: torch.Tensor,
    mask_11TT: torch.Tensor,
    scale: float | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """What every row of a step attends to: all cached rows, and of the step's own those its mask shows.

    Args:
        q_1HTD: queries.
        k_1GND, v_1GND: cached rows with the step's behind them, N = L + T; whole buffers, N = C, if `places` is given.
        mask_11TT: additive, among the step's rows.
        scale: of the scores; None is 1 / sqrt(D).
        places: (T,) int64, where the step's rows lie in the buffers, the first right behind the cached ones: L is data.

    Returns:
        (1, H, T, D).
    """
    if q_1HTD.is_cuda:
        return _on_cuda(q_1HTD, k_1GND, v_1GND, mask_11TT, scale, places)
    total = k_1GND.shape[2]
    if places is not None:
        full = _spread(mask_11TT, places, total)
        return _cpu_flash(q_1HTD, k_1GND, v_1GND, 0.0, False, attn_mask=full, scale=scale)[0]
    rows = q_1HTD.shape[2]
    if rows <= BLOCK:
        return _on_cpu(q_1HTD, k_1GND, v_1GND, mask_11TT, scale)
    blocks = []  # a prompt's rows see half of each other, and none sees one behind it
    for end in range(BLOCK, rows + BLOCK, BLOCK):
        own, seen = slice(end - BLOCK, end), total - rows + end
        mask = mask_11TT[:, :, own, :end]
        blocks.append(_on_cpu(q_1HTD[:, :, own], k_1GND[:, :, :seen], v_1GND[:, :, :seen], mask, scale))
    return torch.cat(blocks, 2)


def _on_cpu(
    q_1HTD: torch.Tensor, k_1GND: torch.Tensor, v_1GND: torch.Tensor, mask_11TU: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """The rows of a block, which see the cached rows and, of the step's, the U up to their last."""
    length = k_1GND.shape[2] - mask_11TU.shape[3]
    if length < SHORT:
        full = F.pad(mask_11TU, (length, 0))
        return _cpu_flash(q_1HTD, k_1GND, v_1GND, 0.0, False, attn_mask=full, scale=scale)[0]
    own = _cpu_flash(q_1HTD, k_1GND[:, :, length:], v_1GND[:, :, length:], 0.0, False, attn_mask=mask_11TU, scale=scale)
    # Without a mask the queries of a KV head are as good as rows of one head: fewer, larger products.
    folded = q_1HTD.reshape(1, k_1GND.shape[1], -1, q_1HTD.shape[3])
    out, lse = _cpu_flash(folded, k_1GND[:, :, :length], v_1GND[:, :, :length], 0.0, False, scale=scale)
    return merge(out.reshape(own[0].shape), lse.reshape(own[1].shape), *own)


def merge(
    out_1HTD: torch.Tensor, lse_1HT: torch.Tensor, other_1HTD: torch.Tensor, other_lse_1HT: torch.Tensor
) -> torch.Tensor:
    """Attention over two sets of keys from the attention over each and its log-sum-exp."""
    share = torch.sigmoid(lse_1HT - other_lse_1HT)[..., None]  # float32 at least: halves would lose the smaller part
    wide = share.dtype
    return torch.lerp(other_1HTD.to(wide), out_1HTD.to(wide), share).to(out_1HTD.dtype)


def masked(
    q_1HTD: torch.Tensor, k_1GTD: torch.Tensor, v_1GTD: torch.Tensor, mask_11TT: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with a mask and its log-sum-exp, in plain products: for the few rows of a step."""
    _, heads, rows, dim = q_1HTD.shape
    q = q_1HTD.reshape(1, k_1GTD.shape[1], -1, rows, dim)  # (1, G, H / G, T, D)
    wide = torch.promote_types(q.dtype, torch.float32)  # scores of halves may overflow, and rounded ones are coarse
    scores = (q.to(wide) * (scale or dim**-0.5)) @ k_1GTD[:, :, None].to(wide).mT + mask_11TT[:, :, None]
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp().to(v_1GTD.dtype) @ v_1GTD[:, :, None]
    return out.reshape(1, heads, rows, -1), lse.reshape(1, heads, rows)


def _spread(mask_11TT: torch.Tensor, places: torch.Tensor, capacity: int) -> torch.Tensor:
    """The mask over whole buffers, (1, 1, T, C): nothing hides the rows before `places`, everything those behind."""
    row, rows = torch.arange(capacity, device=places.device) - places[0], len(places)
    own = mask_11TT[..., row.clamp(0, rows - 1)].masked_fill(row >= rows, torch.finfo(mask_11TT.dtype).min)
    return own.masked_fill(row < 0, 0.0)


def _on_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    places: torch.Tensor | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # of CUDA builds

    rows, total = q.shape[2], k.shape[2]
    if places is None:
        length, used = total - rows, None
        own_k, own_v, k, v = k[:, :, length:], v[:, :, length:], k[:, :, :length], v[:, :, :length]
    else:
        length, used = total, places[:1].int()
        own_k, own_v = k.index_select(2, places), v.index_select(2, places)
    own, own_lse = masked(q, own_k, own_v, mask, scale)
    if not length:
        return own
    ends = torch.arange(2, dtype=torch.int32, device=q.device)  # one sequence: from 0 to its length
    q_THD, k_LGD, v_LGD = (states[0].transpose(0, 1) for states in (q, k, v))
    aux, gqa = AuxRequest(lse=True), q.shape[1] != k.shape[1]
    out_THD, lse = varlen_attn(
        q_THD, k_LGD, v_LGD, ends * rows, ends * length, rows, length,
        return_aux=aux, scale=scale, enable_gqa=gqa, seqused_k=used,
    )  # fmt: skip
    assert lse.shape == q.shape[1:3], "(H, T) in torch 2.13, whatever its page says"
    merged = merge(out_THD.transpose(0, 1)[None], lse[None], own, own_lse)
    return merged if used is None else torch.where(used > 0, merged, own)
