"""Merges attention over two sets of keys by their log-sum-exp (FlashAttention, arXiv 2205.14135, section 3.1).

The log-sum-exp of the scores, `lse`, tells how much weight a set of keys has. An attention sink (gpt_oss) is merged
like a set of one key, which has a learned score for each head and a value of zero.

H: query heads, G: KV heads, D: head dimension, T: step tokens.
"""

from __future__ import annotations

import torch


def merge(
    out_1HTD: torch.Tensor, lse_1HT: torch.Tensor, other_1HTD: torch.Tensor, other_lse_1HT: torch.Tensor
) -> torch.Tensor:
    """Merge the attention outputs over two disjoint sets of keys into the output over all these keys.

    H: heads, T: tokens, D: head dimension.

    Args:
        out_1HTD, other_1HTD: attention output over each set.
        lse_1HT, other_lse_1HT: log-sum-exp of the scores over each set.

    Returns:
        (1, H, T, D), in the dtype of `out_1HTD`.
    """
    share = torch.sigmoid(lse_1HT - other_lse_1HT)[..., None]  # float32 at least: halves would lose the smaller part
    wide = share.dtype
    return torch.lerp(other_1HTD.to(wide), out_1HTD.to(wide), share).to(out_1HTD.dtype)


def with_sinks(
    out_1HTD: torch.Tensor, lse_1HT: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add attention sinks to an attention output that was computed without them.

    H: heads, T: tokens, D: head dimension.

    Args:
        out_1HTD: attention output without sinks.
        lse_1HT: log-sum-exp of the scores that this output was computed from.
        sinks_H: score of each head's sink.

    Returns:
        Attention output with sinks, (1, H, T, D), and the log-sum-exp of its scores, (1, H, T).
    """
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
    """Compute attention under an additive mask in plain matrix products, for few keys such as those of a step.

    H: query heads, G: KV heads, D: head dimension. Queries and keys may differ in number, though both dimensions are
    named T.

    Args:
        q_1HTD: queries.
        k_1GTD, v_1GTD: keys and values.
        mask_11TT: numbers added to the scores, (1, 1, queries, keys).
        scale: factor on the scores; None is 1 / sqrt(D).
        sinks_H: score of each head's attention sink; None: no sinks.

    Returns:
        Attention output (1, H, queries, D), and the log-sum-exp of the scores, (1, H, queries).
    """
    _, heads, num_tokens, dim = q_1HTD.shape
    q = q_1HTD.reshape(1, k_1GTD.shape[1], -1, num_tokens, dim)  # (1, G, H / G, T, D)
    wide = torch.promote_types(q.dtype, torch.float32)  # scores of halves may overflow, and rounded ones are coarse
    scores = (q.to(wide) * (scale or dim**-0.5)) @ k_1GTD[:, :, None].to(wide).mT + mask_11TT[:, :, None]
    lse = scores.logsumexp(-1, keepdim=True)
    if sinks_H is not None:
        lse = torch.logaddexp(lse, sinks_H.reshape(k_1GTD.shape[1], -1, 1, 1).to(wide))
    out = (scores - lse).exp().to(v_1GTD.dtype) @ v_1GTD[:, :, None]
    return out.reshape(1, heads, num_tokens, -1), lse.reshape(1, heads, num_tokens)
