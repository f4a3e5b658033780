"""The attention backend for `exact=bitwise`: a token's result has the same bits whatever other tokens are in the pass.

Other kernels add up a token's keys in an order that depends on where the keys lie and on how many tokens a step has. So
a step of many tokens rounds differently from a step of one token. Here the order depends on positions only. The keys of
a token at position p are in two parts, by their own positions:

    0 ............. A(p) - 1 | A(p) ............. p        A(p) = floor((p - DEPTH) / UNIT) x UNIT, at least 0
    text, tile by tile         the tail: text or draft tokens, gathered along the token's path

Both parts are computed in the same way in a plain step, in a step with a draft tree and in a prompt's chunk. Tiles
begin at multiples of TILE and are added up in order, and the tail always has the same size. A key before A(p) must be
at the place of its position: it is cached, or of the tokens of the text that a step begins with, in order. So a step
reaches at most DEPTH positions beyond the last token of the text. Sums are in float32 or wider. This file is in torch,
for CPUs. For GPUs `lp.attention.by_position_kernel` adds up in another order, which is also the same in every
pass.

H: query heads, G: KV heads, R: query heads of a KV head (H / G), T: tokens of the forward pass, L: cached tokens, N:
keys (L + T), D: head dimension of queries and keys, E: head dimension of values, U: keys of a tail.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from lp.attention.base import AttentionBackend, ForestView, View, score_obstacle
from lp.attention.flash_cuda import DTYPES as CUDA_DTYPES
from lp.attention.flash_cuda import TRITON
from lp.attention.key_places import DEPTH, TILE, KeyPlaces, PlacesMask
from lp.attention.parts import InParts
from lp.attention.registry import register_attention

REMEDY = "choose exact=tokens, and attention=auto"


class _Sums(NamedTuple):
    """The weighted values of some keys, relative to the largest score among them.

    Attributes:
        top_GRT: the largest score; -inf without keys.
        norm_GRT: sum of the exponentials.
        values_GRTE: sum of the values, by their exponentials.
    """

    top_GRT: torch.Tensor
    norm_GRT: torch.Tensor
    values_GRTE: torch.Tensor

    def and_then(self, other: _Sums) -> _Sums:
        """Add the sums over other keys to these; sums over no keys change no bit."""
        top = torch.maximum(self.top_GRT, other.top_GRT)
        base = top.masked_fill(top == -math.inf, 0.0)  # -inf minus itself would be NaN
        own, others = (self.top_GRT - base).exp(), (other.top_GRT - base).exp()
        norm = self.norm_GRT * own + other.norm_GRT * others
        return _Sums(top, norm, self.values_GRTE * own[..., None] + other.values_GRTE * others[..., None])


def attention_by_position(
    q_1HTD: torch.Tensor, k_1GND: torch.Tensor, v_1GNE: torch.Tensor, places: KeyPlaces, scale: float
) -> torch.Tensor:
    """Compute attention in torch, adding up each token's keys in an order that depends on positions only.

    Each token attends to the keys along its path, up to its own position. T: tokens of the forward pass, N: keys, H:
    query heads, G: KV heads, D and E: head dimensions of keys and of values.

    Args:
        q_1HTD: queries of the tokens.
        k_1GND, v_1GNE: keys and values of all sequences, both of cached tokens and of tokens of the forward pass.
        places: where the keys lie that each token attends to.
        scale: factor on the scores.

    Returns:
        (1, T, H, E).
    """
    _, heads, num_tokens, _ = q_1HTD.shape
    out_1THE = q_1HTD.new_zeros(1, num_tokens, heads, v_1GNE.shape[3])
    by_itself = len(places.sequences_Q4) == 1
    for first_token, count, first_key, length in places.sequences_Q4.tolist():
        own, keys = slice(first_token, first_token + count), slice(first_key, first_key + length + count)
        if count:
            of_own = places if by_itself else places.of_rows(own).padded()
            of_own = of_own._replace(tail_keys_TU=of_own.tail_keys_TU - first_key)
            out_1THE[:, own] = _of_sequence(q_1HTD[:, :, own], k_1GND[:, :, keys], v_1GNE[:, :, keys], of_own, scale)
    return out_1THE


def _of_sequence(
    q_1HTD: torch.Tensor, k_1GND: torch.Tensor, v_1GNE: torch.Tensor, places: KeyPlaces, scale: float
) -> torch.Tensor:
    """Attention within one sequence, given its own queries, keys and values alone; places count its keys from 0."""
    own_tokens = q_1HTD.shape[2]
    q_1HTD = F.pad(q_1HTD, (0, 0, 0, len(places.tail_starts_T) - own_tokens))
    _, heads, num_tokens, dim = q_1HTD.shape
    kv_heads, value_dim = v_1GNE.shape[1], v_1GNE.shape[3]
    wide = torch.promote_types(q_1HTD.dtype, torch.float32)
    q_GRTD = (q_1HTD[0].to(wide) * scale).reshape(kv_heads, -1, num_tokens, dim).contiguous()
    k_GND, v_GNE = k_1GND[0].to(wide), v_1GNE[0].to(wide)
    sums = _tail(q_GRTD, k_GND, v_GNE, places)
    cached: _Sums | None = None
    end = int(places.tail_starts_T.max())
    for start in range(0, end, TILE):
        tile = _tile(q_GRTD, k_GND, v_GNE, places, start, end)
        cached = cached.and_then(tile) if cached else tile
    if cached:
        sums = cached.and_then(sums)
    out_GRTE = sums.values_GRTE / sums.norm_GRT[..., None]
    out_1THE = out_GRTE.reshape(1, heads, num_tokens, value_dim).transpose(1, 2)
    return out_1THE[:, :own_tokens].to(q_1HTD.dtype)


def _tile(
    q_GRTD: torch.Tensor, k_GND: torch.Tensor, v_GNE: torch.Tensor, places: KeyPlaces, start: int, end: int
) -> _Sums:
    """The sums over the cached keys of one tile, from `start` on, before each token's A(p); `end`: the largest A(p)."""
    kv_heads, repeats, num_tokens, dim = q_GRTD.shape
    keys = slice(start, min(start + TILE, end))  # others may be no numbers, which no weight of 0 would hide
    k_GSD, v_GSE = (F.pad(part[:, keys], (0, 0, 0, start + TILE - keys.stop)) for part in (k_GND, v_GNE))
    positions_S = torch.arange(start, start + TILE, device=q_GRTD.device)
    seen_TS = (positions_S < places.tail_starts_T[:, None]) & (positions_S >= places.window_starts_T[:, None])
    scores = torch.bmm(q_GRTD.view(kv_heads, -1, dim), k_GSD.transpose(1, 2)).view(kv_heads, repeats, num_tokens, TILE)
    top, weights = _weights(scores.masked_fill_(~seen_TS, -math.inf))
    values = torch.bmm(weights.view(kv_heads, -1, TILE), v_GSE).view(kv_heads, repeats, num_tokens, -1)
    return _Sums(top, weights.sum(-1), values)


def _tail(q_GRTD: torch.Tensor, k_GND: torch.Tensor, v_GNE: torch.Tensor, places: KeyPlaces) -> _Sums:
    """The sums over each token's tail: the keys from A(p) on, in the order of their positions."""
    seen_TU = places.seen_TU
    k_GTUD = k_GND[:, places.tail_keys_TU]
    v_GTUE = v_GNE[:, places.tail_keys_TU]
    scores = (q_GRTD[..., None, :] * k_GTUD[:, None]).sum(-1)  # (G, R, T, U)
    top, weights = _weights(scores.masked_fill_(~seen_TU, -math.inf))
    return _Sums(top, weights.sum(-1), (weights[..., None] * v_GTUE[:, None]).sum(-2))


def _weights(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest score of each row, and the exponentials of scores relative to it; 0 where a score is -inf."""
    top = scores.amax(-1)
    return top, (scores - top.masked_fill(top == -math.inf, 0.0)[..., None]).exp_()


def forward_by_position(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' layers call under `exact=bitwise`.

    H: query heads, G: KV heads, T: tokens of the forward pass, N: keys, D and E: head dimensions of keys and of values.

    Args:
        module: the attention layer.
        query: (1, H, T, D).
        key, value: (1, G, N, D) and (1, G, N, E), cached tokens included; InParts if the forward pass has several
            sequences.
        attention_mask: a `PlacesMask`, which carries where each token's keys lie; or InParts with one for each
            sequence.
        scaling: factor on the scores; None is 1 / sqrt(D).

    Returns:
        (1, T, H, E), and None in place of attention weights, as transformers expects.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_mask, InParts):
        if not (isinstance(key, InParts) and isinstance(value, InParts)):
            raise RuntimeError("the model changes keys or values on their way to its attention function")
        queries = query.split([mask.shape[2] for mask in attention_mask.parts], 2)
        parts = zip(queries, key.parts, value.parts, attention_mask.parts, strict=True)
        return torch.cat([_attend(*part, scale) for part in parts], 1), None
    return _attend(query, key, value, attention_mask, scale), None


def _attend(
    q_1HTD: torch.Tensor, k_1GND: torch.Tensor, v_1GNE: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of the tokens that a PlacesMask is for: by kernels on a GPU, else in torch; (1, T, H, E)."""
    if not isinstance(mask, PlacesMask):
        raise RuntimeError("the model changes masks on their way to its attention function")
    if not q_1HTD.is_cuda:
        return attention_by_position(q_1HTD, k_1GND, v_1GNE, mask.places, scale)
    from lp.attention.by_position_kernel import by_position  # here: it needs Triton

    out_1THE: torch.Tensor = by_position(q_1HTD, k_1GND, v_1GNE, *mask.places, scale)
    return out_1THE


@register_attention("by_position")
class ByPosition(AttentionBackend):
    """The attention backend for `exact=bitwise`, which adds up keys in an order that depends on positions only.

    So a token's result has the same bits whatever other tokens are in the forward pass. `attention=auto` never chooses
    it.
    """

    implementation = "lp_by_position"
    alternative = None
    takes_parts = True
    takes_pools = True
    compiles = False  # torch.compile would lose the places that masks carry
    depth = DEPTH

    def unfit(self, model: PreTrainedModel) -> str | None:
        device = model.device.type
        if device == "cuda" and not TRITON:
            return f"attention=by_position needs Triton on a GPU; install it, or {REMEDY}"
        if device == "cuda" and model.dtype not in CUDA_DTYPES:
            return f"attention=by_position takes no {model.dtype} on a GPU; {REMEDY}"
        if device not in ("cpu", "cuda"):
            return f"attention=by_position runs on CPUs and CUDA devices, not on {device!r}; {REMEDY}"
        return score_obstacle(model, self.name, REMEDY)

    def install(self) -> None:
        AttentionInterface.register(self.implementation, forward_by_position)
        AttentionMaskInterface.register(self.implementation, sdpa_mask)

    def mask(self, view: View) -> torch.Tensor:
        if isinstance(view, ForestView):
            return InParts.of_all([PlacesMask.of(part) for part in view.parts])
        return PlacesMask.of(view)
