"""What a user may set of sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from lp.checks import as_float, check_choice, check_count, set_field
from lp.errors import UserError

if TYPE_CHECKING:
    from transformers import LogitsProcessor


class Verifier(StrEnum):
    """How sampled text is verified."""

    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling that reproduces: one seed gives one text with lookahead on or off, on any number of ranks.

    Args:
        temperature: > 0; greedy decoding is `sampling=None`.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens that together reach this probability; 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest token's probability; 0 keeps all.
        typical_p: locally typical sampling; 1 keeps all.
        repetition_penalty: > 0; 1 is none.
        seed: 0 <= seed < 2**63; None draws one from torch's generator, rank 0's for all.
        verifier: "coupled", or "rejection", which is equal to plain sampling in distribution only.

    Raises:
        ValueError: a value out of range, with the limit and the remedy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    verifier: Verifier = Verifier.COUPLED

    def __post_init__(self) -> None:
        _check_above(self, "temperature", math.inf, "greedy is sampling=None, in the apps sampling=greedy")
        _check_above(self, "top_p", 1, "1.0 keeps every token")
        _check_above(self, "typical_p", 1, "1.0 keeps every token")
        _check_above(self, "repetition_penalty", math.inf, "1.0 is no penalty")
        min_p = as_float(self.min_p)
        if min_p is None or not 0 <= min_p < 1:
            raise UserError(f"min_p is {self.min_p!r}; it must be a number in [0, 1); 0 keeps every token")
        set_field(self, "min_p", min_p)
        check_count(self, "top_k", 0, math.inf, "0 keeps every token")
        if self.seed is not None:
            check_count(self, "seed", 0, 2**63 - 1, "leave it null to draw one")
        check_choice(self, "verifier", Verifier)

    def processors(self) -> list[LogitsProcessor]:
        """transformers' processors for these settings, in its order."""
        import transformers as tf  # takes seconds, and the apps' --help needs no processor

        settings: tuple[tuple[Callable[[Any], LogitsProcessor], float, float], ...] = (  # the last: changes nothing
            (tf.RepetitionPenaltyLogitsProcessor, self.repetition_penalty, 1),
            (tf.TemperatureLogitsWarper, self.temperature, 1),
            (tf.TopKLogitsWarper, self.top_k, 0),
            (tf.TopPLogitsWarper, self.top_p, 1),
            (tf.MinPLogitsWarper, self.min_p, 0),
            (tf.TypicalLogitsWarper, self.typical_p, 1),
        )
        return [processor(value) for processor, value, neutral in settings if value != neutral]


def _check_above(config: SamplingParams, name: str, high: float, remedy: str) -> None:
    """Refuse a field that is not finite and in (0, high], and make it a float."""
    value = getattr(config, name)
    number = as_float(value)
    if number is None or not 0 < number <= high or math.isinf(number):
        limit = "a number > 0" if math.isinf(high) else f"a number in (0, {high:g}]"
        raise UserError(f"{name} is {value!r}; it must be {limit}; {remedy}")
    set_field(config, name, number)
