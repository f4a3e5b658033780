"""Compare methods' tokens with plain decoding's: where they first differ, and whether rounding explains the difference.

V: vocabulary, L: tokens of a prefix. Two logits are a near-tie if they are so close that a kernel which adds in another
order may swap their ranks. lp promises plain decoding's tokens except at near-ties.
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

# Two logits may swap ranks if rounding moves each. How far it moves one is measured on the model itself: passes that
# compute the prefix's last 1, 8 or 64 tokens apart use other kernels. A kernel may be off by twice what these show, and
# by twice the last rounding of the largest logit, which all of them may share.
WIDTHS = (1, 8, 64)
MARGIN = 4  # near-tie over the measured error of one logit: two logits, each off by twice as much


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first position at which a method's tokens differ from plain decoding's.

    A token's scores are the logits after the logits processors, plus Gumbel noise if tokens are sampled. The token with
    the highest score is chosen.

    Args:
        method: name of the method.
        position: index of the differing token among the new tokens, from 0.
        token: the method's token at this position; None if the method's text had ended before.
        plain_token: plain decoding's token at this position; None if plain decoding's text had ended before.
        gap: difference of the two highest scores, computed by a forward pass over the common prefix; None where the
            logits processors leave a single token.
        near_tie: whether rounding explains the difference; False means that something is wrong.
        logit: logit of `token` in that forward pass; None if `token` is None.
        plain_logit: logit of `plain_token` in that forward pass; None if `plain_token` is None.
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
    """Index of the first token in which two texts differ, or at which the shorter one ends; None if they are equal.

    Args:
        tokens: token ids of one text.
        plain: token ids of the other.
    """
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
    """Find where each method's tokens first differ from plain decoding's, and whether rounding explains the difference.

    Args:
        model: the causal LM that generated the tokens; it runs a few forward passes for each difference.
        prompt: token ids of the prompt.
        tokens: new tokens of each method, by method.
        plain: new tokens of the reference, decoder=autoregressive.
        sampling: how all methods sampled; None is greedy. Rejection sampling promises equal distributions only, so no
            difference is reported with it.
        kv_dtype: dtype in which all methods cached keys and values.

    Returns:
        One difference for each method whose tokens differ.
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
    prediction = Prediction.after(model, [*prompt, *plain[:at]], sampling, kv_dtype)
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
    """The scores from which plain decoding samples the token after a prefix, and how far rounding can move them.

    Args:
        prefix: token ids before that token, L of them.
        logits: (V,) float64, from one forward pass.
        near_tie: difference of two logits up to which rounding may swap their ranks.
        sampling: how the token is sampled, with a known seed; None is greedy.
    """

    prefix: list[int]
    logits: torch.Tensor
    near_tie: float
    sampling: SamplingParams | None

    @classmethod
    @torch.inference_mode()
    def after(
        cls,
        model: Any,
        prefix: Sequence[int],
        sampling: SamplingParams | None = None,
        kv_dtype: KVDtype = KVDtype.AUTO,
    ) -> Prediction:
        """Compute the logits after a prefix by one forward pass, and measure how far rounding can move them.

        Rounding is measured by a few further passes that compute the prefix in two parts.

        Args:
            model: the causal LM.
            prefix: token ids, L of them.
            sampling: how the next token is sampled, with a known seed; None is greedy.
            kv_dtype: dtype in which the compared methods cached keys and values.
        """
        ids = torch.tensor([list(prefix)], device=model.device)  # (1, L)
        logits = model(ids, logits_to_keep=1, **_cached(model, kv_dtype)).logits[0, -1].double().cpu()
        off = torch.finfo(model.dtype).eps * max(float(logits.abs().max()), 1.0)
        for width in _comparable(model, len(prefix)):
            off = max(off, float((_in_two_passes(model, ids, width, kv_dtype) - logits).abs().max()))
        return cls(prefix=list(prefix), logits=logits, near_tie=MARGIN * off, sampling=sampling)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute the scores (V,), the highest of which belongs to the sampled token.

        The scores are the logits after the logits processors, plus Gumbel noise if tokens are sampled. The noise
        depends only on the seed and the token's position.

        Args:
            logits: (V,) float64: `self.logits`, or a copy of them that rounding has moved.
        """
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
        """Difference of the two highest scores; None where the logits processors leave a single token."""
        best, second = self.scores(self.logits).topk(2).values.tolist()
        return best - second if math.isfinite(second) else None

    def may_be(self, token: int, other: int) -> bool:
        """Whether rounding can make `token` the sampled token instead of `other`, if logits move by half of `near_tie`.

        Three moves are tried. The first raises `token` against all other tokens. The second brings `token` into the set
        of tokens that a processor such as top-k keeps. The third pushes `other` out of that set.

        Args:
            token: id of the token that a method sampled.
            other: id of plain decoding's token.
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
    """WIDTHS for which two passes differ from one by rounding alone, as the rotary frequencies of both are equal.

    Args:
        length: tokens of the prefix, L.
    """
    boundary = rope_boundary(model.config.get_text_config())
    least = boundary.length + 1 if boundary and length > boundary.length else 1  # tokens of the first pass
    return [width for width in WIDTHS if length - width >= least]


def _cached(model: Any, kv_dtype: KVDtype) -> dict[str, Any]:
    """Keyword arguments of a first pass whose keys and values are rounded as a cache of this dtype rounds them."""
    if kv_dtype is KVDtype.AUTO:
        return {"use_cache": False}
    return {"use_cache": True, cache_keyword(model): RoundedCache(kv_dtype, config=model.config)}


def _in_two_passes(model: Any, ids: torch.Tensor, width: int, kv_dtype: KVDtype) -> torch.Tensor:
    """Logits (V,) behind a prefix (1, L), the last `width` tokens of which are computed in a second pass."""
    # Given, as `generate` gives them: Bamba alone would count those of the second pass from 0.
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    given = _cached(model, kv_dtype) | {"use_cache": True}
    first = model(ids[:, :-width], position_ids=positions[:, :-width], logits_to_keep=1, **given)
    cache = {cache_keyword(model): cache_in(first)}
    second = model(ids[:, -width:], position_ids=positions[:, -width:], use_cache=True, logits_to_keep=1, **cache)
    logits: torch.Tensor = second.logits[0, -1].double().cpu()
    return logits
