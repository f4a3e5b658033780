"""Methods side by side on one prompt: measured in alternation, and their tokens held against plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lp.decoding.base import GenerationOutput

# Two logits this close may swap places when a kernel adds in another order: measured in units in the last place at the
# size logits have (about 20), four in 16 bits, where the last rounding dominates, fifty in float32, where the sums do.
NEAR_TIE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.06}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one method did on one prompt.

    Args:
        output: of its first round.
        decode_s: median of the rounds, in seconds.
    """

    output: GenerationOutput
    decode_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first place where a method's tokens leave those of plain decoding.

    Args:
        method: its name.
        position: index among the new tokens.
        token: the method's token there; None where its text had ended.
        plain_token: plain decoding's; None likewise.
        gap: difference of the model's two best logits there, from one forward of the common prefix.
        near_tie: whether the gap is so small that kernels may disagree.
    """

    method: str
    position: int
    token: int | None
    plain_token: int | None
    gap: float
    near_tie: bool


def alternate(methods: Mapping[str, Callable[[], GenerationOutput]], rounds: int) -> dict[str, Measured]:
    """Run every method once a round, each round beginning with another one, so that drift of the machine hits all.

    Raises:
        KeyboardInterrupt: a run was stopped by Ctrl-C; what it measured is worth nothing.
    """
    names = list(methods)
    outputs: dict[str, list[GenerationOutput]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            output = methods[name]()
            if output.finish_reason == "interrupted":
                raise KeyboardInterrupt
            outputs[name].append(output)
    return {name: Measured(output=runs[0], decode_s=median(r.decode_s for r in runs)) for name, runs in outputs.items()}


def first_difference(tokens: Sequence[int], plain: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter one ends; None if they are equal."""
    for index, (token, other) in enumerate(zip(tokens, plain, strict=False)):
        if token != other:
            return index
    return None if len(tokens) == len(plain) else min(len(tokens), len(plain))


def differences(model: Any, prompt: Sequence[int], tokens: Mapping[str, list[int]], plain: str) -> list[Difference]:
    """Hold every method's tokens against those of the method named `plain`.

    Args:
        model: the causal LM that made them; forwarded once for each difference.
        prompt: the prompt's tokens.
        tokens: the new tokens of each method.
        plain: which of the methods is the oracle.
    """
    found = ((name, first_difference(new, tokens[plain])) for name, new in tokens.items())
    return [_describe(model, prompt, name, tokens[name], tokens[plain], at) for name, at in found if at is not None]


def _describe(model: Any, prompt: Sequence[int], method: str, new: list[int], plain: list[int], at: int) -> Difference:
    gap = logit_gap(model, [*prompt, *plain[:at]])
    return Difference(
        method=method,
        position=at,
        token=new[at] if at < len(new) else None,
        plain_token=plain[at] if at < len(plain) else None,
        gap=gap,
        near_tie=gap < NEAR_TIE.get(model.dtype, 0.0),
    )


@torch.inference_mode()
def logit_gap(model: Any, tokens: Sequence[int]) -> float:
    """Difference of the two best logits behind `tokens`, from one forward of the model."""
    ids = torch.tensor([list(tokens)], device=model.device)  # (1, L)
    best = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].double().topk(2).values
    return float(best[0] - best[1])
