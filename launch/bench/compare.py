"""Tokens of methods compared with plain decoding's: where they part, and whether rounding explains it.

V: vocabulary, L: tokens of a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from lp.config import KVDtype
from lp.engine.rounded_cache import RoundedCache
from lp.models.releases import cache_in, cache_keyword
from lp.models.rope import rope_boundary
from lp.sampling.noise import gumbel
from lp.sampling.params import SamplingParams, Verifier

# Two logits may swap ranks where each is off by what rounding does. That is asked of the model itself, by passes whose
# kernels differ because they compute so many of the prefix's last tokens; a kernel may be off by twice as much as these
# show, and by twice the last rounding of the largest logit, which they may all share.
WIDTHS = (1, 8, 64)
MARGIN = 4  # of a near-tie over what one logit is off: two logits, twice


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first position at which a method's tokens differ from plain decoding's.

    Args:
        method: its name.
        position: index among the new tokens.
        token: the method's token there; None where its text had ended.
        plain_token: plain decoding's token there; None where its text had ended.
        gap: difference of the two best scores there, from one forward of the common prefix; None where the warpers
            leave one token. Scores are the logits, warped and with the noise of sampling if there is any.
        near_tie: whether logits as close as kernels may differ explain both tokens.
    """

    method: str
    position: int
    token: int | None
    plain_token: int | None
    gap: float | None
    near_tie: bool
    logit: float | None = None
    plain_logit: float | None = None


def first_difference(tokens: Sequence[int], plain: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter one ends; None if they are equal."""
    pairs = enumerate(zip_longest(tokens, plain))
    return next((index for index, (token, other) in pairs if token != other), None)


def differences(
    model: Any,
    prompt: Sequence[int],
    tokens: Mapping[str, list[int]],
    plain: list[int],
    sampling: SamplingParams | None = None,
    kv_dtype: str = KVDtype.AUTO,
) -> list[Difference]:
    """Compare every method's tokens with plain decoding's.

    Args:
        model: the causal LM that wrote them; forwarded once for each difference.
        prompt: the prompt's tokens.
        tokens: the new tokens of each method.
        plain: new tokens of the oracle, `lp.AutoregressiveDecoder`.
        sampling: how all of them were sampled; None is greedy. Rejection sampling promises equal distributions, not
            equal tokens, so nothing counts as a difference.
        kv_dtype: what the caches of all of them held keys and values as.
    """
    if sampling is not None and sampling.verifier is Verifier.REJECTION:
        return []
    found = ((name, first_difference(new, plain)) for name, new in tokens.items())
    how = sampling, KVDtype.of(kv_dtype)
    return [_describe(model, prompt, name, tokens[name], plain, at, *how) for name, at in found if at is not None]


def _describe(
    model: Any,
    prompt: Sequence[int],
    method: str,
    new: list[int],
    plain: list[int],
    at: int,
    sampling: SamplingParams | None,
    kv_dtype: KVDtype,
) -> Difference:
    prediction = Prediction.behind(model, [*prompt, *plain[:at]], sampling, kv_dtype)
    token, plain_token = (tokens[at] if at < len(tokens) else None for tokens in (new, plain))
    return Difference(
        method=method,
        position=at,
        token=token,
        plain_token=plain_token,
        gap=prediction.gap(),
        near_tie=token is not None and plain_token is not None and prediction.may_be(token, plain_token),
        logit=None if token is None else float(prediction.logits[token]),
        plain_logit=None if plain_token is None else float(prediction.logits[plain_token]),
    )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The scores by which plain decoding samples the token behind a prefix.

    Args:
        prefix: its tokens.
        logits: (V,) float64, from one forward pass.
        near_tie: two logits this close may swap ranks when a kernel adds in another order.
        sampling: None is greedy; the seed of what draws must be known.
    """

    prefix: list[int]
    logits: torch.Tensor
    near_tie: float
    sampling: SamplingParams | None

    @classmethod
    @torch.inference_mode()
    def behind(
        cls,
        model: Any,
        prefix: Sequence[int],
        sampling: SamplingParams | None = None,
        kv_dtype: KVDtype = KVDtype.AUTO,
    ) -> Prediction:
        """Forward the prefix at once, and in two passes for each of WIDTHS, to learn what rounding does."""
        ids = torch.tensor([list(prefix)], device=model.device)  # (1, L)
        logits = model(ids, logits_to_keep=1, **_cached(model, kv_dtype)).logits[0, -1].double().cpu()
        off = torch.finfo(model.dtype).eps * max(float(logits.abs().max()), 1.0)
        for width in _comparable(model, len(prefix)):
            off = max(off, float((_in_two_passes(model, ids, width, kv_dtype) - logits).abs().max()))
        return cls(prefix=list(prefix), logits=logits, near_tie=MARGIN * off, sampling=sampling)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """(V,), whose argmax is the token: the logits, processed and under the noise of their position."""
        if self.sampling is None:
            return logits
        scores = logits[None]
        ids = torch.tensor([self.prefix])
        for processor in self.sampling.processors():
            scores = processor(ids, scores)
        if self.sampling.greedy:
            return scores[0]
        assert self.sampling.seed is not None
        return scores[0] + gumbel(self.sampling.seed, 0, len(self.prefix), len(logits), logits.device)

    def gap(self) -> float | None:
        """Difference of the two best scores; None where only one token is left."""
        best, second = self.scores(self.logits).topk(2).values.tolist()
        return best - second if math.isfinite(second) else None

    def may_be(self, token: int, other: int) -> bool:
        """Whether moving every logit by at most half a near-tie can make `token` the sampled one instead of `other`.

        Tried are the moves that favour it most: it against all others; it into a warper's selection; `other` out of
        that.
        """
        half = self.near_tie / 2
        logits = self.logits
        against_all = logits - half
        into = torch.where(logits > logits[token], logits - half, logits + half)
        out = torch.where(logits > logits[other], logits + half, logits - half)
        for moved in (against_all, into, out):
            moved[token] = logits[token] + half
            moved[other] = logits[other] - half
        return any(int(self.scores(moved).argmax()) == token for moved in (against_all, into, out))


def _comparable(model: Any, length: int) -> list[int]:
    """WIDTHS with which two passes differ from one by rounding alone, since both have the same rotary frequencies.

    Args:
        length: tokens of the prefix, L.
    """
    boundary = rope_boundary(model.config.get_text_config())
    least = boundary.length + 1 if boundary and length > boundary.length else 1  # tokens of the first pass
    return [width for width in WIDTHS if length - width >= least]


def _cached(model: Any, kv_dtype: KVDtype) -> dict[str, Any]:
    """Arguments of a first pass, whose keys and values are rounded as a cache would round them."""
    if kv_dtype is KVDtype.AUTO:
        return {"use_cache": False}
    return {"use_cache": True, cache_keyword(model): RoundedCache(kv_dtype, config=model.config)}


def _in_two_passes(model: Any, ids: torch.Tensor, width: int, kv_dtype: KVDtype) -> torch.Tensor:
    """The logits (V,) behind a prefix (1, L), of which a second pass computes the last `width` tokens."""
    # Given, as `generate` gives them: Bamba alone would count those of the second pass from 0.
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    given = _cached(model, kv_dtype) | {"use_cache": True}
    first = model(ids[:, :-width], position_ids=positions[:, :-width], logits_to_keep=1, **given)
    cache = {cache_keyword(model): cache_in(first)}
    second = model(ids[:, -width:], position_ids=positions[:, -width:], use_cache=True, logits_to_keep=1, **cache)
    logits: torch.Tensor = second.logits[0, -1].double().cpu()
    return logits
