"""Attention over parts of the keys, and the merge of two parts by their log-sum-exp (FlashAttention, arXiv 2205.14135,
section 3.1).

H: query heads, G: KV heads, D: head dimension, T: step tokens. A log-sum-exp is `lse`.
"""

from __future__ import annotations

import torch


def merge(
    out_1HTD: torch.Tensor, lse_1HT: torch.Tensor, other_1HTD: torch.Tensor, other_lse_1HT: torch.Tensor
) -> torch.Tensor:
    """Attention over two sets of keys from the attention over each and its log-sum-exp."""
    share = torch.sigmoid(lse_1HT - other_lse_1HT)[..., None]  # float32 at least: halves would lose the smaller part
    wide = share.dtype
    return torch.lerp(other_1HTD.to(wide), out_1HTD.to(wide), share).to(out_1HTD.dtype)


def masked_attention(
    q_1HTD: torch.Tensor, k_1GTD: torch.Tensor, v_1GTD: torch.Tensor, mask_11TT: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with a mask and its log-sum-exp, in plain products: for the few keys of a step."""
    _, heads, num_tokens, dim = q_1HTD.shape
    q = q_1HTD.reshape(1, k_1GTD.shape[1], -1, num_tokens, dim)  # (1, G, H / G, T, D)
    wide = torch.promote_types(q.dtype, torch.float32)  # scores of halves may overflow, and rounded ones are coarse
    scores = (q.to(wide) * (scale or dim**-0.5)) @ k_1GTD[:, :, None].to(wide).mT + mask_11TT[:, :, None]
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp().to(v_1GTD.dtype) @ v_1GTD[:, :, None]
    return out.reshape(1, heads, num_tokens, -1), lse.reshape(1, heads, num_tokens)
