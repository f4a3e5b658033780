"""The backend `attention=flash`: attention to all cached keys without a mask, and to the step's own keys with one.

On a CPU these are two calls of torch's FlashAttention, merged by the log-sum-exp (`lse`) of their scores. On a GPU
`lp.attention.flash_cuda` chooses a kernel.

H: query heads, G: KV heads, D: head dimension, T: step tokens, L: cached tokens, C: cache slots, N: keys (L + T or C),
U: keys of the step that a block of queries may see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lp.attention.base import (
    AttentionBackend,
    ForestView,
    Mask,
    PooledView,
    StepView,
    View,
    additive_mask,
    has_sinks,
    score_obstacle,
)
from lp.attention.flash_cuda import DTYPES as CUDA_DTYPES
from lp.attention.flash_cuda import TRITON, step_attention_on_cuda
from lp.attention.merging import masked_attention, merge, with_sinks
from lp.attention.parts import InParts
from lp.attention.registry import register_attention

SHORT = 512  # up to so many cached tokens one masked call is faster on a CPU than two calls and their merge
BLOCK = 128  # queries of a prompt that are computed at once
_cpu_flash: Callable[..., tuple[torch.Tensor, torch.Tensor]] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
)


def step_attention(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GND: torch.Tensor,
    mask_11TT: torch.Tensor,
    scale: float | None = None,
    slot_mapping_T: torch.Tensor | None = None,
    sequences_Q4: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention in a tree-shaped step: each token sees all cached tokens, and step tokens by a mask.

    H: query heads, G: KV heads, D: head dimension, T: step tokens, N: keys, L: cached tokens, C: cache slots.

    Args:
        q_1HTD: queries of the step's tokens.
        k_1GND, v_1GND: keys and values. Without `slot_mapping_T`, those of the cached tokens, followed by the step's, N
            = L + T; with it, those of all cache slots, N = C.
        mask_11TT: numbers added to the scores between the step's own tokens.
        scale: factor on the scores; None is 1 / sqrt(D).
        slot_mapping_T: int64, the consecutive cache slots of the step's tokens. The first one is L, which a CUDA graph
            can read only from a tensor.
        sequences_Q4: where the sequences of a step of several sequences lie, on a GPU only; see
            `AttentionBackend.forward_arguments`.
        sinks_H: score of each head's attention sink; None: no sinks.

    Returns:
        (1, H, T, D).
    """
    if q_1HTD.is_cuda:
        return step_attention_on_cuda(q_1HTD, k_1GND, v_1GND, mask_11TT, scale, slot_mapping_T, sequences_Q4, sinks_H)
    num_tokens = q_1HTD.shape[2]
    num_keys = k_1GND.shape[2]
    if slot_mapping_T is not None:
        mask_11TC = _mask_over_cache(mask_11TT, slot_mapping_T, num_keys)
        return _in_one_call(q_1HTD, k_1GND, v_1GND, mask_11TC, scale, sinks_H)[0]
    if num_tokens <= BLOCK:
        return _on_cpu(q_1HTD, k_1GND, v_1GND, mask_11TT, scale, sinks_H)
    blocks = []  # a prompt's tokens see half of each other, and none sees one behind it
    for end in range(BLOCK, num_tokens + BLOCK, BLOCK):
        block = slice(end - BLOCK, end)
        visible_keys = num_keys - num_tokens + end
        k, v = k_1GND[:, :, :visible_keys], v_1GND[:, :, :visible_keys]
        blocks.append(_on_cpu(q_1HTD[:, :, block], k, v, mask_11TT[:, :, block, :end], scale, sinks_H))
    return torch.cat(blocks, 2)


def _in_one_call(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GND: torch.Tensor,
    mask_11TN: torch.Tensor | None,
    scale: float | None,
    sinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention under an additive mask (None: to all keys) by one call on a CPU; and its log-sum-exp."""
    found = _cpu_flash(q_1HTD, k_1GND, v_1GND, 0.0, False, attn_mask=mask_11TN, scale=scale)
    return found if sinks_H is None else with_sinks(*found, sinks_H)


def _on_cpu(
    q_1HTD: torch.Tensor,
    k_1GND: torch.Tensor,
    v_1GND: torch.Tensor,
    mask_11TU: torch.Tensor,
    scale: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a block of queries on a CPU, to the cached tokens and, by the mask, to the step's first U tokens."""
    length = k_1GND.shape[2] - mask_11TU.shape[3]
    if length < SHORT:
        return _in_one_call(q_1HTD, k_1GND, v_1GND, F.pad(mask_11TU, (length, 0)), scale, sinks_H)[0]
    own = _in_one_call(q_1HTD, k_1GND[:, :, length:], v_1GND[:, :, length:], mask_11TU, scale, sinks_H)
    # Without a mask the queries of a KV head may as well be tokens of one head: fewer, larger products.
    folded_q = q_1HTD.reshape(1, k_1GND.shape[1], -1, q_1HTD.shape[3])  # (1, G, H / G * T, D)
    out, lse = _cpu_flash(folded_q, k_1GND[:, :, :length], v_1GND[:, :, :length], 0.0, False, scale=scale)
    return merge(out.reshape(own[0].shape), lse.reshape(own[1].shape), *own)


def _mask_over_cache(mask_11TT: torch.Tensor, slot_mapping_T: torch.Tensor, capacity: int) -> torch.Tensor:
    """Widen a step's mask to all cache slots, (1, 1, T, C): slots before the step's are seen, those behind are not."""
    num_tokens = len(slot_mapping_T)
    index_C = torch.arange(capacity, device=slot_mapping_T.device) - slot_mapping_T[0]  # index among the step's tokens
    mask_11TC = mask_11TT[..., index_C.clamp(0, num_tokens - 1)]
    mask_11TC = mask_11TC.masked_fill(index_C >= num_tokens, torch.finfo(mask_11TT.dtype).min)
    return mask_11TC.masked_fill(index_C < 0, 0.0)


def flash_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    slot_mapping: torch.Tensor | None = None,
    sequences: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of the backend `flash`, which transformers' layers call; the mask decides how it computes.

    A mask (1, 1, T, T) covers a step's own tokens only, and `step_attention` computes it. Other masks cover all keys,
    as for sliding windows. These are computed by sdpa, or without sdpa if there are sinks. H: query heads, G: KV heads,
    T: tokens, N: keys, D: head dimension.

    Args:
        module: the attention layer.
        query: (1, H, T, D).
        key, value: (1, G, N, D), cached tokens included; InParts if the step has several sequences.
        attention_mask: the step's mask, as `Flash.mask` makes it; None: no mask.
        scaling: factor on the scores; None is 1 / sqrt(D).
        slot_mapping, sequences: `slot_mapping_T` and `sequences_Q4` of `step_attention`.
        s_aux: (H,), scores of the attention sinks, under transformers' name for them; None: no sinks.

    Returns:
        (1, T, H, D), and None in place of attention weights, as transformers expects.
    """
    if isinstance(attention_mask, InParts) or isinstance(key, InParts):
        if not (isinstance(attention_mask, InParts) and isinstance(key, InParts) and isinstance(value, InParts)):
            raise RuntimeError("the model changes keys, values or masks on their way to its attention function")
        queries = query.split([mask.shape[2] for mask in attention_mask.parts], 2)
        parts = zip(queries, key.parts, value.parts, attention_mask.parts, strict=True)
        return torch.cat([_attention_of_part(module, *part, scaling, s_aux, kwargs) for part in parts], 1), None
    num_tokens = query.shape[2]
    # The masks that transformers makes are bool; that of a sliding window covers all keys.
    is_own = (
        attention_mask is not None
        and attention_mask.is_floating_point()
        and attention_mask.shape[-1] == num_tokens
        and not (query.is_cuda and num_tokens == key.shape[2] and s_aux is None)
    )
    if attention_mask is None and num_tokens == 1 and query.device.type == "cpu":  # a plain step: it sees everything
        return _in_one_call(query, key, value, None, scaling, s_aux)[0].transpose(1, 2), None
    if attention_mask is None or not is_own:
        if s_aux is not None:
            return _over_all_keys(query, key, value, attention_mask, scaling, s_aux).transpose(1, 2).contiguous(), None
        out_and_none: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out_and_none
    out = step_attention(query, key, value, attention_mask, scaling, slot_mapping, sequences, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _over_all_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    sinks_H: torch.Tensor,
) -> torch.Tensor:
    """Attention with sinks, which sdpa can't compute, under a mask over all keys (None: causal): (1, H, T, D)."""
    num_tokens, num_keys = query.shape[2], key.shape[2]
    if mask is None:
        visible_TN = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=query.device)
        mask = visible_TN.tril(num_keys - num_tokens)[None, None]
    if not mask.is_floating_point():
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    if query.device.type == "cpu":
        return _in_one_call(query, key, value, mask, scaling, sinks_H)[0]
    blocks = zip(query.split(BLOCK, 2), mask.split(BLOCK, 2), strict=True)
    return torch.cat([masked_attention(own, key, value, shown, scaling, sinks_H)[0] for own, shown in blocks], 2)


def _attention_of_part(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    s_aux: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention within one of several sequences of a step: (1, T, H, D)."""
    sees_everything = mask.shape[2:] == (1, 1) and query.device.type == "cpu"  # which a single token does
    shown = None if sees_everything else mask
    return flash_attention_forward(module, query, key, value, shown, scaling, s_aux=s_aux, **kwargs)[0]


@register_attention("flash")
class Flash(AttentionBackend):
    """The fast backend for tree-shaped steps: cached keys are attended to without a mask, the step's own keys with one.

    `attention=auto` chooses it for models loaded with sdpa, FlashAttention or flex, and for all models with attention
    sinks.
    """

    implementation = "lp_tree"  # transformers takes a name with "flash" in it for the flash-attn package
    alternative = "sdpa"
    replaces = ("sdpa", "flex", "flash_attention_2", "flash_attention_3", "flash_attention_4")
    omits_trivial_masks = True
    takes_parts = True
    takes_pools = TRITON

    def unfit(self, model: PreTrainedModel) -> str | None:
        device = model.device.type
        if device == "cuda" and model.dtype not in CUDA_DTYPES:
            names = " and ".join(str(dtype).removeprefix("torch.") for dtype in CUDA_DTYPES)
            return f"attention=flash takes {names} on a GPU, and this model is {model.dtype}; choose attention=sdpa"
        if device not in ("cpu", "cuda"):
            return f"attention=flash runs on CPUs and CUDA devices, not on {device!r}; choose attention=sdpa"
        return score_obstacle(model, self.name, takes_sinks=True)

    def replaced_in(self, model: PreTrainedModel) -> tuple[str, ...]:
        # A model with sinks was loaded with eager for lack of anything else, but for the package flash-attn.
        return (*self.replaces, "eager") if has_sinks(model) else self.replaces

    def install(self) -> None:
        AttentionInterface.register(self.implementation, flash_attention_forward)
        AttentionMaskInterface.register(self.implementation, sdpa_mask)

    def mask(self, view: View) -> Mask:
        if isinstance(view, ForestView):
            return InParts.of_all([self._mask_of(part) for part in view.parts])
        return self._mask_of(view)

    def _mask_of(self, view: StepView | PooledView) -> torch.Tensor:
        # A sliding window hides cached tokens too: a mask over all keys, as sdpa's.
        over_all_keys = view.window is not None or (
            isinstance(view, PooledView) and not (self.takes_pools and view.visible_TT.is_cuda)
        )
        return additive_mask(view.visible_TN() if over_all_keys else view.visible_TT, view.dtype)

    def forward_arguments(
        self, slot_mapping_T: torch.Tensor, sequences_Q4: torch.Tensor | None = None
    ) -> dict[str, Any]:
        return {"slot_mapping": slot_mapping_T, "sequences": sequences_Q4}
