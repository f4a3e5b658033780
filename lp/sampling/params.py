"""Sampling parameters of a request: temperature, warpers, repetition penalty, seed, and how drafts are verified."""

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


# Of a model's finite logits (65504 at most in float16), scores within these limits are finite in float32.
LEAST_TEMPERATURE = 1e-20
MOST_PENALTY = 1e6


class Verifier(StrEnum):
    """How draft tokens of sampled text are verified: "coupled" (one seed gives one text) or "rejection" (Algorithm 4).

    Algorithm 4 is the paper's: its text equals plain sampling in distribution, not token by token.
    """

    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling that reproduces: one seed gives one text with lookahead on or off, on any number of ranks.

    Args:
        temperature: number >= 1e-20 that scores are divided by. 0 decodes greedily: it takes the likeliest token after
            the repetition penalty, whatever seed, top_k, top_p, min_p and typical_p are.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens that together reach this probability; 1 keeps all.
        min_p: drop tokens whose probability is below this fraction of the likeliest token's; 0 keeps all.
        typical_p: locally typical sampling: keep the tokens whose surprise is nearest to the expected one and that
            together reach this probability; 1 keeps all.
        repetition_penalty: transformers' penalty on tokens of the prompt and of the generated text, in [1e-6, 1e6]; 1
            is none.
        seed: 0 <= seed < 2**63; None: rank 0 draws one from torch's generator for all ranks.
        verifier: "coupled": the text is a function of its seed; or "rejection": it equals plain sampling in
            distribution only, and needs a temperature > 0.

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
        temperature = as_float(self.temperature)
        if temperature is None or not (temperature == 0 or LEAST_TEMPERATURE <= temperature < math.inf):
            limit = f"0, which is greedy, or a number >= {LEAST_TEMPERATURE:g}"
            raise UserError(f"temperature is {self.temperature!r}; it must be {limit}; try 0.8")
        set_field(self, "temperature", temperature)
        _check_share(self, "top_p")
        _check_share(self, "typical_p")
        penalty = as_float(self.repetition_penalty)
        if penalty is None or not 1 / MOST_PENALTY <= penalty <= MOST_PENALTY:
            limit = f"a number in [{1 / MOST_PENALTY:g}, {MOST_PENALTY:g}]"
            raise UserError(f"repetition_penalty is {self.repetition_penalty!r}; it must be {limit}; 1.0 is no penalty")
        set_field(self, "repetition_penalty", penalty)
        min_p = as_float(self.min_p)
        if min_p is None or not 0 <= min_p < 1:
            raise UserError(f"min_p is {self.min_p!r}; it must be a number in [0, 1); 0 keeps every token")
        set_field(self, "min_p", min_p)
        check_count(self, "top_k", 0, math.inf, "0 keeps every token")
        if self.seed is not None:
            check_count(self, "seed", 0, 2**63 - 1, "leave it null to draw one")
        check_choice(self, "verifier", Verifier)
        if self.greedy and self.verifier is Verifier.REJECTION:
            raise UserError(
                "verifier is 'rejection' with a temperature of 0, which draws nothing; leave one of them out"
            )

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy: each token is the likeliest one after the repetition penalty."""
        return self.temperature == 0

    def processors(self) -> list[LogitsProcessor]:
        """Make transformers' logits processors for these settings, in the order of transformers' `generate`."""
        import transformers as tf  # takes seconds, and the apps' --help needs no processor

        settings: tuple[tuple[Callable[[Any], LogitsProcessor], float, float], ...] = (  # the last: changes nothing
            (tf.RepetitionPenaltyLogitsProcessor, self.repetition_penalty, 1),
        )
        warpers: tuple[tuple[Callable[[Any], LogitsProcessor], float, float], ...] = (
            (tf.TemperatureLogitsWarper, self.temperature, 1),
            (tf.TopKLogitsWarper, self.top_k, 0),
            (tf.TopPLogitsWarper, self.top_p, 1),
            (tf.MinPLogitsWarper, self.min_p, 0),
            (tf.TypicalLogitsWarper, self.typical_p, 1),
        )
        if not self.greedy:
            settings += warpers
        return [processor(value) for processor, value, neutral in settings if value != neutral]


def is_greedy(sampling: SamplingParams | None) -> bool:
    """Whether decoding is greedy, so that no token is drawn at random: `sampling` is None, or its temperature is 0."""
    return sampling is None or sampling.greedy


def _check_share(config: SamplingParams, name: str) -> None:
    """Refuse a field that is not in (0, 1], and make it a float."""
    value = getattr(config, name)
    number = as_float(value)
    if number is None or not 0 < number <= 1:
        raise UserError(f"{name} is {value!r}; it must be a number in (0, 1]; 1.0 keeps every token")
    set_field(config, name, number)
