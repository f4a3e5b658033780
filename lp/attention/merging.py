"""Attention over parts of the keys, and the merge of two parts by their log-sum-exp (FlashAttention, arXiv 2205.14135,
section 3.1). An attention sink (gpt_oss) is a part too: one key, of a score of its own and a value of zero.

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


def with_sinks(
    out_1HTD: torch.Tensor, lse_1HT: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over some keys and the sinks of all heads, and its log-sum-exp, from the attention over those keys."""
    wide = torch.promote_types(out_1HTD.dtype, torch.float32)
    sinks_H1 = sinks_H[:, None].to(wide)
    share = torch.sigmoid(lse_1HT - sinks_H1)[..., None]
    return (out_1HTD.to(wide) * share).to(out_1HTD.dtype), torch.logaddexp(lse_1HT.to(wide), sinks_H1)


def masked_attention(
    q_1HTD: torch.Tensor,
    k_1GTD: torch.Tensor,
    v_1GTD: torch.Tensor,
    mask_11TT: torch.Tensor,
    scale: float | None,
    sinks_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with a mask and its log-sum-exp, in plain products: for the few keys of a step."""
    _, heads, num_tokens, dim = q_1HTD.shape
    q = q_1HTD.reshape(1, k_1GTD.shape[1], -1, num_tokens, dim)  # (1, G, H / G, T, D)
    wide = torch.promote_types(q.dtype, torch.float32)  # scores of halves may overflow, and rounded ones are coarse
    scores = (q.to(wide) * (scale or dim**-0.5)) @ k_1GTD[:, :, None].to(wide).mT + mask_11TT[:, :, None]
    lse = scores.logsumexp(-1, keepdim=True)
    if sinks_H is not None:
        lse = torch.logaddexp(lse, sinks_H.reshape(k_1GTD.shape[1], -1, 1, 1).to(wide))
    out = (scores - lse).exp().to(v_1GTD.dtype) @ v_1GTD[:, :, None]
    return out.reshape(1, heads, num_tokens, -1), lse.reshape(1, heads, num_tokens)
